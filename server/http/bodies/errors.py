"""Error responses: status, headers, and a body in OpenAI's form, or in Anthropic's below /v1/messages."""

import http
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from orca_jax.errors import InvalidRequest, OrcaError, QueueFull, ServiceClosed, shown
from server.errors import NotReady, Unauthorized, UnknownModel, UnknownResponse
from server.gateway.gateway import Gateway, retry_after_seconds
from server.http.bodies.json_text import as_json
from server.statuses import meaning

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"  # Anthropic's protocol: this path and the paths below it

_MOST_CHARACTERS = 600  # of a message, which may quote megabytes that the client sent
_THREAD_NOT_FOUND = "thread_not_found"  # upon which Anthropic's clients send the whole conversation
_BELOW_500 = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """The error. `param` is the dotted path of the field at fault, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with status 400 or above."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """The error; its message names the field at fault, if there is one."""

    type: str
    message: str
    details: Annotated[dict[str, str] | None, Field(description="only for an unknown thread")] = None


class MessagesErrorBody(BaseModel):
    """The body of every response of Anthropic's protocol with status 400 or above."""

    type: Literal["error"]
    error: MessagesErrorDetail


class Trouble(NamedTuple):
    """An error, independent of the protocol. `type` and `code` are OpenAI's."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


def is_anthropic(path: str) -> bool:
    """Whether the path belongs to Anthropic's protocol."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def openai_body(trouble: Trouble) -> dict[str, Any]:
    """The error in OpenAI's form, without lone surrogates, so that every JSON encoder can write it."""
    message, param = _readable(trouble.message), trouble.param
    field = None if param is None else _readable(param)
    return {"error": {"message": message, "type": trouble.type, "param": field, "code": trouble.code}}


def anthropic_body(trouble: Trouble) -> dict[str, Any]:
    """The error in Anthropic's form."""
    kind = _TYPES.get(trouble.status, _BELOW_500 if trouble.status < 500 else "api_error")
    if trouble.code == "engine_failed":  # no retry helps
        kind = "api_error"
    error: dict[str, Any] = {"type": kind, "message": _readable(trouble.message)}
    if trouble.code == _THREAD_NOT_FOUND:
        error["details"] = {"error_code": _THREAD_NOT_FOUND}
    return {"type": "error", "error": error}


def body_at(path: str, trouble: Trouble) -> dict[str, Any]:
    """The error in the form of the protocol that `path` belongs to."""
    return anthropic_body(trouble) if is_anthropic(path) else openai_body(trouble)


def _readable(text: str) -> str:
    """The text, shortened if it is long, and without lone surrogates, which UTF-8 cannot encode."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


NOT_READY_SECONDS = 5  # the Retry-After while the server is not ready

# The `code` of errors of HTTP itself. Other statuses have no code.
_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}


def error_responses(
    *statuses: int, form: type[ErrorBody | MessagesErrorBody] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Describe these statuses in a route's `responses`, for the OpenAPI document."""
    return {status: {"model": form, "description": http.HTTPStatus(status).phrase} for status in statuses}


def trouble_of(error: OrcaError) -> Trouble:
    """Convert an error of our tree."""
    status, kind, code, _ = meaning(error)
    param = error.param if isinstance(error, InvalidRequest | UnknownResponse) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return Trouble(status, str(error), kind, param, code)


def error_response(error: OrcaError, *, path: str = "", retry_after: int | None = None) -> Response:
    """The error as an HTTP response to a request for `path`. `retry_after` is in whole seconds."""
    headers: dict[str, str] = {}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(path, trouble_of(error), headers)


def error_event(error: OrcaError, path: str = "") -> bytes:
    """The event for an error that ended a stream early, in the form of the path's protocol.

    Clients raise it, and expect no event after it. In protocols whose events have names it is called `error`.
    """
    trouble = trouble_of(error)
    body, name = body_at(path, trouble), ""
    if path == RESPONSES:
        body = {"type": "error", "code": trouble.code, "message": trouble.message, "param": trouble.param}
    if "type" in body:
        name = "event: error\n"
    return f"{name}data: {as_json(body)}\n\n".encode("ascii")


def status_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> Response:
    """An error of HTTP itself, such as 404 or 413, as a response to a request for `path`."""
    return _response(path, Trouble(status, message, code=_CODES.get(status)), headers)


def handle_errors(app: FastAPI) -> None:
    """Turn every error that a route raises into a response in the form of its protocol."""
    app.add_exception_handler(OrcaError, _on_orca_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_orca_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrcaError)
    retry_after = _retry_after(error, request.app.state.gateway)
    return error_response(error, path=request.url.path, retry_after=retry_after)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    of_query = errors[0]["loc"][0] == "query"
    param, message = fault(errors, dict(request.query_params) if of_query else error.body)
    return _response(request.url.path, Trouble(400, message, param=param))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, path, headers = error.detail, request.url.path, error.headers
    if error.status_code == 404:
        message = f"there is nothing at {request.method} {path}; GET /openapi.json shows what there is"
    elif error.status_code == 405:
        route = getattr(request.scope.get("route"), "path", "")
        # Starlette names only the methods of the first route of the path.
        methods = request.app.state.methods.get(route, (error.headers or {}).get("Allow", "").split(", "))
        headers = {"Allow": ", ".join(sorted(methods))}
        message = f"{path} does not take {request.method}, but {headers['Allow']}"
    return status_response(error.status_code, message, headers, path=path)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Answer the client. Starlette raises the error again afterwards, so that the server logs it."""
    request_id = request.scope["state"]["request_id"]
    error.add_note(f"request id: {request_id}")
    message = f"the server failed in an unexpected way; its log has more under request id {request_id}"
    return _response(request.url.path, Trouble(500, message, "server_error"))


def _retry_after(error: OrcaError, gateway: Gateway) -> int | None:
    if isinstance(error, NotReady | ServiceClosed):
        return NOT_READY_SECONDS
    return retry_after_seconds(gateway) if isinstance(error, QueueFull) else None


def _response(path: str, trouble: Trouble, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(body_at(path, trouble), ensure_ascii=False)
    return Response(text, trouble.status, headers=headers, media_type="application/json")


_MOST_RULES = 4  # of a field with several possible types, in a message
_PYDANTIC = "Input should be "
_OBJECT_TYPES = ("dict_type", "model_type", "model_attributes_type")
_FieldPath = tuple[str | int, ...]


def fault(errors: Sequence[Mapping[str, Any]], body: object) -> tuple[str | None, str]:
    """The dotted path of the field at fault, None for the body itself, and the error message.

    `errors` are pydantic's, `body` is the request body. Only the first field at fault is reported. A field
    with several possible types has an error for each, and the message lists them all.
    """
    first = errors[0]
    path = _field_path(first, body)
    param = ".".join(map(str, path)) or None
    name = param or "the body"
    if first["type"] == "missing":
        return param, f"{name} is missing" + ("" if param else "; send a JSON object")
    if first["type"] == "extra_forbidden":
        return param, f"{name} is not known here; leave it out (GET /openapi.json shows what there is)"
    at_fault: Any = body
    for step in path:
        at_fault = at_fault[step]
    value = f"{name} is {shown(at_fault)}"
    if not first["msg"].startswith(_PYDANTIC):  # the message is a complete sentence
        return param, f"{value}; {first['msg'].removeprefix('Value error, ')}"
    rules = dict.fromkeys(
        _rule(error, below[len(path) :])
        for error in errors
        if (below := _field_path(error, body))[: len(path)] == path
    )
    return param, f"{value}; it should be {', or '.join(islice(rules, _MOST_RULES))}"


def _field_path(error: Mapping[str, Any], body: object) -> _FieldPath:
    """The path of the error in the body, without pydantic's names for the alternatives of a union."""
    steps = error["loc"][1:]  # after "body" or "query"
    path: list[str | int] = []
    value = body
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif not (last and error["type"] == "missing"):
            continue
        path.append(step)
    return tuple(path)


def _rule(error: Mapping[str, Any], below: _FieldPath) -> str:
    rule = "a JSON object" if error["type"] in _OBJECT_TYPES else error["msg"].removeprefix(_PYDANTIC)
    return rule if not below else f"at {'.'.join(map(str, below))} {rule}"
