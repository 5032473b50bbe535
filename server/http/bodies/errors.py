"""Every error as OpenAI's clients expect one: the shape, the status, the headers."""

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

_MOST_CHARACTERS = 600  # of a message: what a client sent may be quoted in it, and may be megabytes
NOT_READY_SECONDS = 5  # until a client may look again

# `type` and `code` where the status itself is the error; every other one is a mistake of the client's.
_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the field at fault, dotted, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer from 400 on."""

    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses as a route's `responses`, so that the OpenAPI document has them."""
    return {
        status: {"model": ErrorBody, "description": http.HTTPStatus(status).phrase} for status in statuses
    }


def error_body(error: OrcaError) -> dict[str, Any]:
    """The error in OpenAI's shape; any JSON encoder can write it, whatever characters it quotes."""
    _, kind, code, _ = meaning(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return _body(str(error), kind, param, code)


def error_response(error: OrcaError, *, retry_after: int | None = None) -> Response:
    """The error as an answer. `retry_after`, in whole seconds, becomes a header."""
    headers: dict[str, str] = {}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(meaning(error).http, error_body(error), headers)


def status_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error of HTTP itself, such as 404 or 413, as an answer."""
    return _response(status, _body(message, "invalid_request_error", None, _CODES.get(status)), headers)


def handle_errors(app: FastAPI) -> None:
    """Let every error that a route raises become an answer of this shape."""
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
        message = f"there is nothing at {request.method} {request.url.path}; GET /docs shows what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}, but {allowed}"
    return status_response(error.status_code, message, error.headers)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """What the client sees; behind this Starlette raises the error again, so that the server logs it."""
    request_id = request.scope["state"]["request_id"]
    error.add_note(f"request id: {request_id}")
    message = f"the server failed in an unexpected way; its log has more under request id {request_id}"
    return _response(500, _body(message, "server_error", None, None))


def _retry_after(error: OrcaError, gateway: Gateway) -> int | None:
    if isinstance(error, NotReady | ServiceClosed):
        return NOT_READY_SECONDS
    return retry_after_seconds(gateway) if isinstance(error, QueueFull) else None


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    detail = {"message": _plain(message), "type": kind, "param": None if param is None else _plain(param)}
    return {"error": {**detail, "code": code}}


def _plain(text: str) -> str:
    """No longer than a person reads, and without lone surrogates, which have no UTF-8."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _response(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json.dumps(body, ensure_ascii=False), status, headers=headers, media_type="application/json"
    )
