"""Where tokens begin in a text, and which of them have come out with what came out of the text.

Text lags behind tokens while it may be the beginning of a stop string or of a character, and what is told of
tokens lags with it.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.generation import Piece


class PlacedToken(NamedTuple):
    """A token with the characters of text before the character that it begins in.

    `logprob` and `top` are TokenLogprobs'; None for the first token of a prompt, which nothing comes before.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


def n_characters(tokens: Sequence[PlacedToken]) -> int:
    """About as many as it takes to tell of them."""
    return sum(12 * (1 + len(token.top or ())) for token in tokens)


class _Characters:
    """Counts the characters of a text that comes in bytes; it counts those that are not UTF-8 as U+FFFD."""

    def __init__(self, offset: int) -> None:
        self._n = offset  # that are complete
        self._open = b""

    def place(self, data: bytes) -> int:
        """Take a token's bytes; the place of the character that has the first of them."""
        if not data:
            return self._n
        self._feed(data[:1])
        first = self._n if self._open else self._n - 1
        if len(data) > 1:
            self._feed(data[1:])
        return first

    def _feed(self, data: bytes) -> None:
        data = self._open + data
        text, n_decoded = utf_8_decode(data, "replace", False)
        self._n += len(text)
        self._open = data[n_decoded:]


class TokenPlaces:
    """One output's. A token comes out with the character that it begins in.

    One that is no text, as special tokens are, comes out with the next that is. So none comes out behind a
    stop string, and no end of sequence; but all that are left do when the output ends for its length.
    Without a tokenizer there is no text to wait for, and every token comes out at once.
    """

    def __init__(self, tokenizer: Tokenizer | None, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._characters = _Characters(offset)
        self._n_out = offset
        self._waiting: list[tuple[PlacedToken, bool]] = []  # and whether it is text

    def take(self, piece: Piece) -> list[PlacedToken]:
        """The tokens that come out with this piece of the output."""
        for token_id, (_, logprob, top) in zip(piece.token_ids, piece.logprobs, strict=True):
            data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
            placed = PlacedToken(token_id, self._characters.place(data), logprob, top)
            self._waiting.append((placed, bool(data)))
        self._n_out += len(piece.text)
        if self._tokenizer is None or piece.finish_reason is FinishReason.LENGTH:
            n = len(self._waiting)
        else:
            n = self._n_begun()
        out = [placed for placed, _ in self._waiting[:n]]
        del self._waiting[:n]
        return out

    def _n_begun(self) -> int:
        """Up to the last that is text and whose text has begun to come out."""
        n = 0
        for i, (placed, is_text) in enumerate(self._waiting, 1):
            if placed.offset >= self._n_out:
                break
            if is_text:
                n = i
        return n


def prompt_places(
    token_ids: Sequence[int], text: bytes, known: Iterable[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[PlacedToken]:
    """A prompt's tokens. A special token is text where its name stands in the prompt's `text`, in UTF-8.

    `known` are the log-probabilities of all tokens but the first.
    """
    characters = _Characters(0)
    placed = list[PlacedToken]()
    at = 0
    logprobs = iter(known)
    for token_id in token_ids:
        data = b""
        if tokenizer is not None:
            data = tokenizer.token_bytes(token_id)
            name = b"" if data else (tokenizer.token_name(token_id) or "").encode()
            if name and text.startswith(name, at):
                data = name
        at += len(data)
        one = next(logprobs) if placed else None
        placed.append(PlacedToken(token_id, characters.place(data), one and one.logprob, one and one.top))
    return placed
