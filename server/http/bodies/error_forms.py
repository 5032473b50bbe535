"""The form of an error's body: OpenAI's, and Anthropic's for the paths of its protocol."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

MESSAGES = "/v1/messages"  # Anthropic's protocol: this path and those below it

_MOST_CHARACTERS = 600  # of a message, which may quote what the client sent, and that may be megabytes
_THREAD_NOT_FOUND = "thread_not_found"  # Anthropic's clients send the whole conversation after it
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
    """What went wrong. `param` is the dotted path of the field at fault, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with status 400 or above."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """What went wrong; the message names the field at fault, if there is one."""

    type: str
    message: str
    details: Annotated[dict[str, str] | None, Field(description="of an unknown thread; else left out")] = None


class MessagesErrorBody(BaseModel):
    """The body of every response of Anthropic's protocol with status 400 or above."""

    type: Literal["error"]
    error: MessagesErrorDetail


class Trouble(NamedTuple):
    """An error before it has a form. `type` and `code` are OpenAI's."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


def is_anthropic(path: str) -> bool:
    """Whether the path belongs to Anthropic's protocol."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def openai_body(trouble: Trouble) -> dict[str, Any]:
    """The error in OpenAI's form. Any JSON encoder can write it, whatever characters it quotes."""
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
    """Shortened if long, and without lone surrogates, which UTF-8 cannot encode."""
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
