"""Error responses as OpenAI's clients expect them: body, status and headers."""

import http
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from orca_jax.errors import InvalidRequest, OrcaError, QueueFull, ServiceClosed
from server.errors import NotReady, Unauthorized, UnknownModel, meaning
from server.gateway.gateway import Gateway
from server.gateway.retry_after import retry_after_seconds
from server.http.fields.validation import fault

_MOST_CHARACTERS = 600  # of a message, which may quote what the client sent, and that may be megabytes
NOT_READY_SECONDS = 5  # the Retry-After while the server is not ready

# The `code` of errors of HTTP itself. A status that is not listed has no code.
_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}


class ErrorDetail(BaseModel):
    """What went wrong. `param` is the dotted path of the field at fault, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with status 400 or above."""

    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses as a route's `responses`, for the OpenAPI document."""
    return {
        status: {"model": ErrorBody, "description": http.HTTPStatus(status).phrase} for status in statuses
    }


def error_body(error: OrcaError) -> dict[str, Any]:
    """The error in OpenAI's form. Any JSON encoder can write it, whatever characters it quotes."""
    _, kind, code, _ = meaning(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return _body(str(error), kind, param, code)


def error_response(error: OrcaError, *, retry_after: int | None = None) -> Response:
    """The error as an HTTP response. `retry_after`, in whole seconds, becomes a header."""
    headers: dict[str, str] = {}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(meaning(error).http, error_body(error), headers)


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error of HTTP itself, such as 404 or 413, as a response."""
    return _response(status, _body(message, "invalid_request_error", None, _CODES.get(status)), headers)


def handle_errors(app: FastAPI) -> None:
    """Turn every error that a route raises into a response in OpenAI's form."""
    app.add_exception_handler(OrcaError, _on_orca_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_orca_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrcaError)
    return error_response(error, retry_after=_retry_after(error, request.app.state.gateway))


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    param, message = fault(error.errors(), error.body)
    return _response(400, _body(message, "invalid_request_error", param, None))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = (
            f"there is nothing at {request.method} {request.url.path}; GET /openapi.json shows what there is"
        )
    elif error.status_code == 405:
        allowed = _methods_at(request) or (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}, but {allowed}"
        return status_response(405, message, {**(error.headers or {}), "Allow": allowed})
    return status_response(error.status_code, message, error.headers)


def _methods_at(request: Request) -> str:
    """The methods of all routes of this path; the error itself has those of the first one alone."""
    path = getattr(request.scope.get("route"), "path_format", None)
    methods = request.app.openapi()["paths"].get(path, ())
    return ", ".join(sorted(method.upper() for method in methods))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """The response to the client. Starlette raises the error again afterwards, so that the server logs it."""
    request_id = request.scope["state"]["request_id"]
    error.add_note(f"request id: {request_id}")
    message = f"the server failed in an unexpected way; its log has more under request id {request_id}"
    return _response(500, _body(message, "server_error", None, None))


def _retry_after(error: OrcaError, gateway: Gateway) -> int | None:
    if isinstance(error, NotReady | ServiceClosed):
        return NOT_READY_SECONDS
    return retry_after_seconds(gateway) if isinstance(error, QueueFull) else None


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    field = None if param is None else _readable(param)
    return {"error": {"message": _readable(message), "type": kind, "param": field, "code": code}}


def _readable(text: str) -> str:
    """Shortened if long, and without lone surrogates, which UTF-8 cannot encode."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _response(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json.dumps(body, ensure_ascii=False), status, headers=headers, media_type="application/json"
    )
