"""The reference of the HTTP API, from its OpenAPI document."""

from collections.abc import Iterator
from typing import Any

from scripts.site.markdown import cell, code, table

_REF = "#/components/schemas/"


def http_page(document: dict[str, Any]) -> str:
    """Every route with its fields and statuses, and every schema that a route names."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    parts = ["# HTTP\n", f"{cell(document['info']['description'])}\n"]
    parts.append(
        "A server has the same as `/openapi.json`, and for people at `/docs`. The routes under `/admin` "
        "exist where `ORCA_ADMIN_KEYS` is set.\n"
    )
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(f"{method.upper()} {path}", operation)
    parts.append("## Schemas\n")
    for name, schema in schemas.items():
        parts += [f"### {name}\n", cell(schema.get("description", "")), "", *_fields(schema)]
    return "\n".join(parts)


def _operation(title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"## {code(title)}\n"
    yield cell(operation.get("description", "")) + "\n"
    parameters = operation.get("parameters", ())
    if parameters:
        rows = [
            (code(each["name"]), each["in"], _type(each["schema"]), cell(each.get("description", "")))
            for each in parameters
        ]
        yield table(("parameter", "in", "type", "meaning"), rows)
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield f"Body: {_type(content['schema'])}\n"
    rows = [
        (status, cell(response["description"]), ", ".join(_answers(response)))
        for status, response in operation["responses"].items()
    ]
    yield table(("status", "meaning", "body"), rows)


def _answers(response: dict[str, Any]) -> Iterator[str]:
    for kind, content in response.get("content", {}).items():
        schema = content.get("schema")
        yield f"{code(kind)} {_type(schema)}" if schema else code(kind)


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    rows = [
        (code(name), _type(field), "yes" if name in required else "", cell(field.get("description", "")))
        for name, field in schema.get("properties", {}).items()
    ]
    if rows:
        yield table(("field", "type", "required", "meaning"), rows)


def _type(schema: dict[str, Any]) -> str:
    """A field's type and bounds in a few words; a link if it is a schema of its own."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return code(str(schema["const"]))
    if "enum" in schema:
        return " or ".join(code(str(value)) for value in schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        kinds = [_type(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) + _bounds(schema)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema)}"
    return f"{schema.get('type', 'any')}{_bounds(schema)}"


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low:g}"
    return f", at most {high:g}" if low is None else f", {low:g} to {high:g}"
