"""Corrects FastAPI's OpenAPI document: adds the middleware's responses, and removes 422."""

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.gateway.side_threads import run_for_response
from server.http.authentication import OPEN_PATHS, is_admin
from server.http.bodies.errors import ErrorBody, MessagesErrorBody, error_responses, is_anthropic
from server.http.fields.strict import HEADER

_DOCUMENT_LENGTH = 200_000  # characters, about
_BODY_ERRORS = (400, 408, 413, 415)
_SCHEME = "bearer"
_KEY_HEADER = "x-api-key"  # in Anthropic's protocol
_UNUSED = {
    "description": "the accepted but unused fields of the request, separated by commas; left out if none",
    "schema": {"type": "string"},
}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


async def document(request: Request) -> Response:
    """Send the OpenAPI document of the app. Making it takes 0.3 to 0.5 s: once, on a side thread."""
    app = request.app
    if app.state.document is None:
        app.state.document = await run_for_response(
            _DOCUMENT_LENGTH, lambda: JSONResponse(app.openapi()).body
        )
    return Response(app.state.document, media_type="application/json")


def describe(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of `app`. `keyed` says whether API keys are required."""
    document = FastAPI.openapi(app)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            form = MessagesErrorBody if is_anthropic(path) else ErrorBody
            is_keyed = (keyed and path not in OPEN_PATHS) or is_admin(path)
            _correct(operation, form.__name__, keyed=is_keyed)
            if is_keyed and form is MessagesErrorBody:
                operation["security"].append({_KEY_HEADER: []})
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    if keyed or any(map(is_admin, document["paths"])):
        schemes: dict[str, Any] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
        if keyed:
            schemes[_KEY_HEADER] = {"type": "apiKey", "in": "header", "name": _KEY_HEADER}
        document["components"]["securitySchemes"] = schemes
    return document


def _correct(operation: dict[str, Any], error_form: str, *, keyed: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    statuses = [*(_BODY_ERRORS if "requestBody" in operation else ()), *((401,) if keyed else ())]
    for status, response in error_responses(*statuses).items():
        schema = {"$ref": f"#/components/schemas/{error_form}"}
        content = {"application/json": {"schema": schema}}
        responses.setdefault(str(status), {"description": response["description"], "content": content})
    if "requestBody" in operation:
        responses["200"]["headers"] = {HEADER: _UNUSED}
    for response in responses.values():
        if "text/event-stream" in response.get("content", {}):
            response["content"]["text/event-stream"] = {"itemSchema": _EVENT}
    operation["responses"] = dict(sorted(responses.items()))
    if keyed:
        operation["security"] = [{_SCHEME: []}]
