"""Log-probabilities as OpenAI's two APIs write them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from server.http.fields.token_names import TokenNames
from server.http.fields.token_places import PlacedToken

Logprobs = dict[str, Any]
LogprobsWriter = Callable[[Sequence[PlacedToken], TokenNames], Logprobs]

_LEAST = -9999.0  # for the logarithm of nothing, which JSON does not have; OpenAI's value


class CompletionLogprobs(BaseModel):
    """Of a completion's tokens, each list with an element for each token. The first token of a prompt has no
    log-probability. `text_offset` counts the characters of the choice's text before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """One of the likeliest tokens at its place; `bytes` are those of its text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


def completion_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """As CompletionLogprobs. The token itself stands with the likeliest, if it is none of them."""
    return {
        "tokens": [names.name(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """As ChatLogprobs, of tokens of an output."""
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
        top.setdefault(names.name(token_id), _finite(logprob))  # of two with one name the likelier is told
    return top


def _entry(token_id: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    assert logprob is not None, "an answer's token has something before it"
    return {
        "token": names.name(token_id),
        "logprob": _finite(logprob),
        "bytes": names.byte_values(token_id),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
