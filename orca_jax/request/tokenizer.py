"""Text to token ids and back, incrementally, with stop strings.

Supports only byte-level BPE (GPT-2, OPT). There a token is a fixed sequence of bytes whatever its neighbours,
so text can be decoded token by token at constant cost, with the same result as decoding all at once.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel

from orca_jax.errors import CorruptFile, InvalidPrompt, NotACheckpoint, UnsupportedModel
from orca_jax.request.rust_panic import is_failure
from orca_jax.request.stop_strings import StopSearch, StopStrings

_MAX_FILE_BYTES = 100_000_000


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes map to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """A checkpoint's tokenizer.json, as read by the `tokenizers` library. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError if the tokenizer is not byte-level."""
        if not isinstance(tokenizer.decoder, ByteLevel):
            raise ValueError(f"its decoder is {type(tokenizer.decoder).__name__}, not ByteLevel")
        tokenizer.no_truncation()  # a prompt that is too long is rejected, never cut
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        }
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Raises NotACheckpoint (cannot be read), CorruptFile or UnsupportedModel, each naming the file."""
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise NotACheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if len(data) > _MAX_FILE_BYTES:
            raise CorruptFile(f"{path} has more than {_MAX_FILE_BYTES} bytes, too many for a tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:  # the library raises plain Exception, and may panic
            if not is_failure(error):
                raise
            raise CorruptFile(f"{path} is not a tokenizer's file: {error}") from error
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise UnsupportedModel(f"{path}: only byte-level BPE is supported; {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens around it if the file's post-processor adds them.

        OPT's adds `</s>` in front, GPT-2's adds none; without `add_special_tokens` none is added. The name of
        a special token within the text becomes that token, as in Hugging Face's tokenizers. Raises
        InvalidPrompt for text that is not valid Unicode (lone surrogates) or that has no tokens here.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"the prompt is not valid Unicode: a lone surrogate at character {error.start}"
            raise InvalidPrompt(message, param="prompt") from error
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if not is_failure(error):
                raise
            raise InvalidPrompt(f"the tokenizer cannot encode the prompt: {error}", param="prompt") from error

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token; `n` tokens stand for at most `n` times as many."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for a special token, or an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def token_name(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None for an id without a token."""
        return self._tokenizer.id_to_token(token_id)

    def _look_up(self, token_id: int) -> bytes:
        try:
            token = self.token_name(token_id)
        except BaseException as error:  # this is the scheduler's thread, which all other requests need
            if not is_failure(error):
                raise
            return "\ufffd".encode()
        if token is None or token in self._special:
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with a character outside the alphabet is plain text
            return token.encode("utf-8")


class TextStream:
    """Turns a request's tokens into text as they arrive; an `orca_jax.request.request.OutputSink`.

    No part of a stop string is ever released, nor anything after it: a possible beginning of one is held
    back until it is decided. So are the first bytes of an incomplete character. Stop strings are searched in
    the text after the first `min_tokens` tokens. A request's outputs share their StopStrings.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] | StopStrings = (), *, min_tokens: int = 0
    ) -> None:
        self.stopped = False
        self._n_early = min_tokens
        self._tokenizer = tokenizer
        stops = stop if isinstance(stop, StopStrings) else StopStrings(stop) if stop else None
        self._stops = None if stops is None else StopSearch(stops)
        self._open: bytes = b""  # the bytes of an incomplete character
        self._held = ""
        self._safe: list[str] = []
        self._n_taken = 0  # pieces of `_safe`

    @property
    def text(self) -> str:
        """All text released so far, taken or not."""
        return "".join(self._safe)

    def push(self, token_id: int) -> bool:
        """Add a token; True from the moment that a stop string is complete."""
        if not self.stopped:
            self._feed(self._tokenizer.token_bytes(token_id), final=False)
            self._n_early = max(0, self._n_early - 1)
        return self.stopped

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._safe[self._n_taken :])
        self._n_taken = len(self._safe)
        return text

    def finish(self) -> None:
        """The request has ended: release what was held back, unless a stop string ended it."""
        if not self.stopped:
            self._feed(b"", final=True)
            self._safe.append(self._held)
            self._held = ""

    def _feed(self, data: bytes, *, final: bool) -> None:
        data = self._open + data
        text, n_decoded = utf_8_decode(data, "replace", final)
        self._open = data[n_decoded:]
        if self._stops is None or self._n_early:
            self._safe.append(text)
            return
        held = self._held + text
        match = self._stops.feed(text)
        if match is not None:
            end, length = match
            self._safe.append(held[: len(self._held) + end - length])
            self._held = ""
            self.stopped = True
        else:
            n_safe = len(held) - self._stops.n_open
            self._safe.append(held[:n_safe])
            self._held = held[n_safe:]
