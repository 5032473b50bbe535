"""Log-probabilities in the forms of OpenAI's completions and chat APIs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from server.http.fields.token_names import TokenNames
from server.http.fields.token_places import PlacedToken

Logprobs = dict[str, Any]
LogprobsWriter = Callable[[Sequence[PlacedToken], TokenNames], Logprobs]

_LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


class CompletionLogprobs(BaseModel):
    """Of a completion's tokens: each list has one element per token.

    The first token of a prompt has no log-probability. `text_offset` is the number of characters of the
    choice's text before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position. `bytes` are the UTF-8 bytes of its text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a reply."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a reply's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


def completion_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """In the form of CompletionLogprobs. `top_logprobs` always includes the chosen token itself."""
    return {
        "tokens": [names.name(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """In the form of ChatLogprobs, for output tokens."""
    return {
        "content": [
            {
                **_entry(token.token_id, token.logprob, names),
                "top_logprobs": [_entry(token_id, logprob, names) for token_id, logprob in token.top or ()],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _top(token: PlacedToken, names: TokenNames) -> dict[str, float] | None:
    if token.logprob is None or token.top is None:
        return None
    top = dict[str, float]()
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        top.setdefault(names.name(token_id), _finite(logprob))  # if two share a name, keep the likelier one
    return top


def _entry(token_id: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    assert logprob is not None, "every output token has a log-probability"
    return {
        "token": names.name(token_id),
        "logprob": _finite(logprob),
        "bytes": names.byte_values(token_id),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
