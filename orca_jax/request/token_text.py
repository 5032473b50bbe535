"""Decodes tokens to text, one token at a time, by the decoders of tokenizer.json.

Three kinds are supported. Byte-level BPE (GPT-2, Llama 3, Qwen, Falcon, BLOOM ...) writes every token in an
alphabet of bytes. SentencePiece's kind (Llama 2, Mistral, Gemma, Phi-3, T5) writes text with U+2581 for a
space, and `<0xE4>` for a byte that has no token of its own. WordPiece (BERT) marks a token that continues a
word, and puts a space before all others. In any case the text of the tokens so far equals
what the `tokenizers` library decodes at once, at constant cost per token.
"""

import json
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

_REPLACEMENT = "\ufffd"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes map to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class TokenText(NamedTuple):
    """A token's share of the text, in bytes; `at_start` is its share if it is the first token of the text.

    `is_byte` marks a byte fallback token such as `<0xE4>`.
    """

    data: bytes
    at_start: bytes
    is_byte: bool = False


class TextDecoder(Protocol):
    """Decodes the tokens of one text in order; `n` counts the characters so far, without incomplete ones."""

    @property
    def n(self) -> int: ...

    def push(self, token: TokenText) -> str:
        """Add a token; returns the text that is now certain."""
        ...

    def place(self, token: TokenText) -> int:
        """Add a token; returns the number of characters before the character in which it begins."""
        ...

    def finish(self) -> str:
        """Return the rest of the text: an incomplete character becomes U+FFFD."""
        ...


class TokenDecoder(Protocol):
    """A tokenizer's decoder: the text of each token, and how the texts are joined."""

    @property
    def drops_first_space(self) -> bool:
        """Whether a text loses a space at its beginning."""
        ...

    def token_text(self, token: str) -> TokenText:
        """The text of a token that is not special, as it appears inside a text."""
        ...

    def begin(self, *, continuing: bool) -> TextDecoder:
        """Decode a new text, or with `continuing` one that follows other text."""
        ...


class UnsupportedDecoder(ValueError):
    """A decoder that cannot be followed token by token."""


def token_decoder(state: bytes | None) -> TokenDecoder:
    """The decoder that the `tokenizers` library describes by this JSON. Raises UnsupportedDecoder."""
    steps = [] if state is None else _steps(json.loads(state))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel()
    if kinds == ["Metaspace"]:
        (step,) = steps
        space = step["replacement"]
        dropped = "" if step.get("prepend_scheme", "always") == "never" else space
        return _SentencePiece(((space, " "),), dropped_from_first=dropped)
    if kinds == ["WordPiece"]:
        return _WordPiece(steps[0]["prefix"], cleans=steps[0]["cleanup"])
    replacements = list[tuple[str, str]]()
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback"
    if byte_fallback:
        steps.pop(0)
    fused = bool(steps) and steps[0]["type"] == "Fuse"
    if fused:
        steps.pop(0)
    content, n_stripped = "", 0
    if fused and steps and steps[0]["type"] == "Strip" and not steps[0]["stop"]:
        step = steps.pop(0)
        content, n_stripped = step["content"], step["start"]
    if steps or not replacements:
        raise UnsupportedDecoder(
            f"its decoder is {' + '.join(kinds) or 'missing'}; it must be byte-level (ByteLevel), WordPiece, "
            "or SentencePiece's (Metaspace; or Replace, ByteFallback, Fuse and, at a text's beginning, Strip)"
        )
    return _SentencePiece(tuple(replacements), byte_fallback, content, n_stripped)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoders of a sequence, however nested."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in _steps(each)]


class _ByteLevel:
    drops_first_space = False

    def token_text(self, token: str) -> TokenText:
        try:
            data = bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with a character outside the alphabet is plain text
            data = token.encode("utf-8")
        return TokenText(data, data)

    def begin(self, *, continuing: bool) -> TextDecoder:
        return Utf8Decoder()


class Utf8Decoder:
    """Decodes bytes; those that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self.n = 0
        self._open = b""  # the bytes of an incomplete character

    def push(self, token: TokenText) -> str:
        return self._feed(token.data)

    def place(self, token: TokenText) -> int:
        data = token.data
        if not data:
            return self.n
        self._feed(data[:1])
        first = self.n if self._open else self.n - 1
        self._feed(data[1:])
        return first

    def finish(self) -> str:
        return self._feed(b"", final=True)

    def _feed(self, data: bytes, *, final: bool = False) -> str:
        data = self._open + data
        text, n_decoded = utf_8_decode(data, "replace", final)
        self._open = data[n_decoded:]
        self.n += len(text)
        return text


@dataclass(frozen=True, slots=True)
class _SentencePiece:
    """SentencePiece's decoder.

    It drops up to `n_stripped` times `stripped` from the beginning of a text, as the Strip decoder does, or
    every `dropped_from_first` from the first token, as Metaspace does.
    """

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool = False
    stripped: str = ""
    n_stripped: int = 0
    dropped_from_first: str = ""

    @property
    def drops_first_space(self) -> bool:
        return self.n_stripped > 0 or self.dropped_from_first != ""

    def token_text(self, token: str) -> TokenText:
        first = self._replaced(
            token.replace(self.dropped_from_first, "") if self.dropped_from_first else token
        )
        token = self._replaced(token)
        if (
            self.byte_fallback
            and len(token.encode()) == 6
            and token.startswith("<0x")
            and token.endswith(">")
        ):
            try:
                byte = bytes([int(token[3:5], 16)])
                return TokenText(byte, byte, is_byte=True)
            except ValueError:
                pass
        return TokenText(token.encode("utf-8"), first.encode("utf-8"))

    def _replaced(self, token: str) -> str:
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def begin(self, *, continuing: bool) -> TextDecoder:
        return _Pieces(self.stripped, 0 if continuing else self.n_stripped, at_start=not continuing)


# Texts of which the library's WordPiece decoder drops a space, in this order, within a token's text.
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((f" '{end}", f"'{end}") for end in ("s", "ve", "re")),
)


@dataclass(frozen=True, slots=True)
class _WordPiece:
    """WordPiece's decoder; `prefix` marks a token that continues a word."""

    prefix: str
    cleans: bool
    drops_first_space = True

    def token_text(self, token: str) -> TokenText:
        is_inside = token.startswith(self.prefix)
        inside = token[len(self.prefix) :] if is_inside else f" {token}"
        return TokenText(self._cleaned(inside).encode("utf-8"), self._cleaned(token).encode("utf-8"))

    def _cleaned(self, text: str) -> str:
        for old, new in _CLEANED if self.cleans else ():
            text = text.replace(old, new)
        return text

    def begin(self, *, continuing: bool) -> TextDecoder:
        return _Pieces("", 0, at_start=not continuing)


class _Pieces:
    """Decodes pieces and bytes. A run of bytes that is not UTF-8 becomes one U+FFFD for each byte.

    Whether a run is UTF-8 is known when it ends, so its text is held back until the next piece.
    """

    def __init__(self, stripped: str, n_stripped: int, *, at_start: bool) -> None:
        self.n = 0
        self._stripped = stripped
        self._n_stripped = n_stripped
        self._at_start = at_start
        self._run = bytearray()

    def push(self, token: TokenText) -> str:
        at_start, self._at_start = self._at_start, False
        if token.is_byte:
            self._run += token.data
            return ""
        text = self._add(self._end_run())
        return text + self._add((token.at_start if at_start else token.data).decode("utf-8"))

    def place(self, token: TokenText) -> int:
        if token.is_byte:
            self.push(token)
            return self.n + len(self._run.decode("utf-8", "replace")) - 1
        self._add(self._end_run())
        first = self.n
        self.push(token)
        return first

    def finish(self) -> str:
        return self._add(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _add(self, text: str) -> str:
        while text and self._n_stripped:
            if text[0] == self._stripped:
                text = text[1:]
                self._n_stripped -= 1
            else:
                self._n_stripped = 0
        self.n += len(text)
        return text
