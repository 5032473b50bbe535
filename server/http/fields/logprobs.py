"""Log-probabilities in responses: the tokens that belong to a piece of text, their names, and their JSON.

Text is held back while it may be the beginning of a stop string, or is an incomplete character. The
log-probabilities of its tokens are held back with it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.token_text import TextDecoder, TokenText, Utf8Decoder
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.output import Piece


class PlacedToken(NamedTuple):
    """A token and its `offset`, the number of characters before the character in which the token begins.

    `logprob` and `top` are as in TokenLogprobs, or None for a prompt's first token, which has no context.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


def n_characters(tokens: Sequence[PlacedToken]) -> int:
    """Roughly how many characters the log-probabilities of these tokens take in a response."""
    return sum(12 * (1 + len(token.top or ())) for token in tokens)


class TokenPlaces:
    """Places one output's tokens. A token is released with the character in which it begins.

    A token without text, such as a special token, is released with the next token that has text. So
    neither tokens after a stop string nor an end-of-sequence token are released, unless the output ends
    because of its length, or all are wanted (`every`): then all remaining tokens are. Without a tokenizer
    there is no text to wait for, and every token is released at once. `continuing` says that the output
    follows other text, and `shown` has the special tokens that count as text, as in TextStream.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        offset: int = 0,
        *,
        continuing: bool = True,
        shown: Mapping[int, TokenText] | None = None,
        every: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._releasing = {*FinishReason} if every else {FinishReason.LENGTH}  # all tokens at the end
        self._special = shown or {}
        self._decoder: TextDecoder = Utf8Decoder()
        if tokenizer is not None:
            self._decoder = tokenizer.text_decoder(continuing=continuing)
        self._offset = offset
        self._n_shown = offset  # characters of text so far
        self._waiting: list[tuple[PlacedToken, bool]] = []  # tokens, and whether each has text

    def take(self, piece: Piece) -> list[PlacedToken]:
        """The tokens to release with this piece of the output."""
        for token_id, (_, logprob, top) in zip(piece.token_ids, piece.logprobs, strict=True):
            text = self._special.get(token_id)
            if text is None and self._tokenizer is not None:
                text = self._tokenizer.token_text(token_id)
            place = self._decoder.n if text is None else self._decoder.place(text)
            placed = PlacedToken(token_id, self._offset + place, logprob, top)
            self._waiting.append((placed, text is not None and bool(text.data)))
        self._n_shown += len(piece.text)
        if self._tokenizer is None or piece.finish_reason in self._releasing:
            n = len(self._waiting)
        else:
            n = self._n_begun()
        released = [placed for placed, _ in self._waiting[:n]]
        del self._waiting[:n]
        return released

    def _n_begun(self) -> int:
        """The number of waiting tokens up to the last one with text that has begun to be shown."""
        n = 0
        for i, (placed, has_text) in enumerate(self._waiting, 1):
            if placed.offset >= self._n_shown:
                break
            if has_text:
                n = i
        return n


def prompt_places(
    token_ids: Sequence[int], text: bytes, logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[PlacedToken]:
    """Place a prompt's tokens in its `text`, which is in UTF-8.

    A special token counts as text where its name appears in the prompt. `logprobs` has the log-probabilities
    of all tokens but the first.
    """
    characters = Utf8Decoder()
    placed = list[PlacedToken]()
    n_bytes = 0
    remaining = iter(logprobs)
    for token_id in token_ids:
        data = b""
        if tokenizer is not None:
            data = tokenizer.token_bytes(token_id)
            name = b"" if data else (tokenizer.token_name(token_id) or "").encode()
            if name and text.startswith(name, n_bytes):
                data = name
            if not n_bytes and data[:1] == b" " != text[:1] and tokenizer.drops_first_space:
                data = data[1:]
        n_bytes += len(data)
        scored = next(remaining) if placed else None
        offset = characters.place(TokenText(data, data))
        placed.append(PlacedToken(token_id, offset, scored and scored.logprob, scored and scored.top))
    return placed


class TokenNames:
    """The names of a model's tokens, cached. Without a tokenizer every name is `token_id:` and the number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def name(self, token_id: int) -> str:
        """The token's text; or `bytes:` and its bytes, as OpenAI writes them, if they are not valid UTF-8.

        A special token has its own name. Any other token is `token_id:7`.
        """
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._look_up(token_id)
        return name

    def byte_values(self, token_id: int) -> list[int] | None:
        """The bytes of the token's text; None if it has no text."""
        if token_id not in self._bytes:
            self._bytes[token_id] = list(self._data(token_id)) or None
        return self._bytes[token_id]

    def _look_up(self, token_id: int) -> str:
        data = self._data(token_id)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        special = None if self.tokenizer is None else self.tokenizer.token_name(token_id)
        return text or special or f"token_id:{token_id}"

    def _data(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)


Logprobs = dict[str, Any]
LogprobsWriter = Callable[[Sequence[PlacedToken], TokenNames], Logprobs]

_LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens. Each list has one element per token.

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
    """The log-probabilities of a reply's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


def completion_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """Log-probabilities in the form of CompletionLogprobs. `top_logprobs` includes the chosen token."""
    return {
        "tokens": [names.name(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, names) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[PlacedToken], names: TokenNames) -> Logprobs:
    """Log-probabilities of output tokens, in the form of ChatLogprobs."""
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


class PromptLogprob(BaseModel):
    """A token where the prompt has one: the prompt's own, or one of the most likely.

    `rank` counts from 1, the likeliest; null if the prompt's token is none of the requested ones.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# For each of the prompt's tokens the entries by token id; null for the first, which has no context.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(scored: Sequence[TokenLogprobs], names: TokenNames) -> list[dict[str, Any] | None]:
    """Log-probabilities in the form of PromptLogprobs, which is vLLM's, of all tokens but the first."""
    written: list[dict[str, Any] | None] = [None]
    for token_id, logprob, top in scored:
        likely = [(each, value, rank) for rank, (each, value) in enumerate(top, 1)]
        entries = {
            str(each): {"logprob": _finite(value), "rank": rank, "decoded_token": names.name(each)}
            for each, value, rank in [(token_id, logprob, None), *likely]
        }
        written.append(entries)
    return written


def _top(token: PlacedToken, names: TokenNames) -> dict[str, float] | None:
    if token.logprob is None or token.top is None:
        return None
    top = dict[str, float]()
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        top.setdefault(names.name(token_id), _finite(logprob))  # if two share a name, keep the likelier one
    return top


def _entry(token_id: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    assert logprob is not None, "every output token has a log-probability"
    return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": names.byte_values(token_id)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
