"""Text to token ids and back, incrementally, with stop strings."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers

from orca_jax.errors import CorruptFile, InvalidPrompt, NotACheckpoint, UnsupportedModel, is_failure
from orca_jax.gguf_file import is_gguf, open_gguf
from orca_jax.request.gguf_tokenizer import gguf_tokenizer
from orca_jax.request.stop_strings import StopSearch, StopStrings
from orca_jax.request.token_text import TextDecoder, TokenText, UnsupportedDecoder, token_decoder

_MAX_FILE_BYTES = 100_000_000
_MOST_COMPOSED = 4  # characters that Unicode normalization composes into one


class Tokenizer:
    """A checkpoint's tokenizer.json, as read by the `tokenizers` library. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedDecoder, a ValueError, if tokens cannot be decoded one by one."""
        decoder = tokenizer.decoder
        self._decoder = token_decoder(None if decoder is None else decoder.__getstate__())
        tokenizer.no_truncation()  # a prompt that is too long is rejected, never cut
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special = {
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        }
        self._texts: dict[int, TokenText | None] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json, or the tokenizer of a GGUF file, which must have one (`has_tokenizer`).

        Raises NotACheckpoint (cannot be read), BadModelConfig, CorruptFile or UnsupportedModel, each naming
        the file.
        """
        made = gguf_tokenizer(open_gguf(path)) if is_gguf(path) else _read_json(path)
        try:
            return cls(made)
        except UnsupportedDecoder as error:
            raise UnsupportedModel(f"{path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens that the file's post-processor adds around it.

        Llama's adds `<s>` in front, GPT-2's adds none; without `add_special_tokens` none is added. The name
        of a special token within the text becomes that token, as in Hugging Face's tokenizers. A text that
        begins with the name of the beginning-of-sequence token, as chat templates write it, gets that token
        once, not twice. Raises InvalidPrompt for text that is not valid Unicode (lone surrogates) or that
        this tokenizer cannot encode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"the prompt is not valid Unicode: a lone surrogate at character {error.start}"
            raise InvalidPrompt(message, param="prompt") from error
        with _encoding("prompt"):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            token_ids = encoding.ids
            if token_ids[:1] == token_ids[1:2] and encoding.special_tokens_mask[:2] == [1, 0]:
                return token_ids[1:]  # added, although the text begins with it
            return token_ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts with the special tokens around and between them; as `encode` otherwise."""
        with _encoding("pair"):  # which may have a lone surrogate
            return self._tokenizer.encode(first, second).ids

    def encode_template(self, template: str, texts: Mapping[str, str]) -> list[int]:
        """Token ids of `template` with each of `texts` in the place of its name, and nothing added around it.

        The name of a special token becomes that token in the template alone. Within the texts it stays plain
        text, so that none of them can end the turn that it is in (but a Unigram model may have it as a
        piece). Raises InvalidPrompt.
        """
        places = re.compile("|".join(map(re.escape, texts)))
        names = sorted(self._special, key=len, reverse=True)
        token_ids = list[int]()
        with _encoding("prompt"):
            for part in re.split(f"({'|'.join(map(re.escape, names))})", template) if names else [template]:
                token_id = self.special_id(part)
                if token_id is None:
                    filled = places.sub(lambda name: texts[name[0]], part)
                    token_ids += self._without_special.encode(filled, add_special_tokens=False).ids
                else:
                    token_ids.append(token_id)
        return token_ids

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy that reads names of special tokens as plain text."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of `text` after other text, without the space that SentencePiece puts before a text.

        Raises InvalidPrompt.
        """
        before = self.encode("\n", add_special_tokens=False)
        token_ids = self.encode(f"\n{text}", add_special_tokens=False)
        if before and token_ids[: len(before)] == before:
            return token_ids[len(before) :]
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def max_token_length(self) -> int:
        """The characters of the longest token: `n` tokens stand for at most `n` times as many."""
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        return longest if self._tokenizer.normalizer is None else longest * _MOST_COMPOSED

    def token_id(self, name: str) -> int | None:
        """The id of the token with this name; None if there is none."""
        return self._tokenizer.token_to_id(name)

    def token_name(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None for any number that is not a token id."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def names(self) -> dict[int, str]:
        """Every token's name in the vocabulary, by id."""
        return {token_id: name for name, token_id in self._tokenizer.get_vocab().items()}

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        decoder = self.text_decoder()
        texts = (self.token_text(token_id) for token_id in token_ids)
        return "".join([decoder.push(text) for text in texts if text is not None] + [decoder.finish()])

    def text_decoder(self, *, continuing: bool = False) -> TextDecoder:
        """A decoder for the tokens of one text as they arrive; `continuing` if it follows other text."""
        return self._decoder.begin(continuing=continuing)

    @property
    def drops_first_space(self) -> bool:
        """Whether a text loses a space at its beginning, as with SentencePiece."""
        return self._decoder.drops_first_space

    def have_text(self, token_ids: Iterable[int]) -> bool:
        """Whether any of these tokens has text, so that the next token continues a text.

        Always true for a tokenizer that treats the beginning of a text like any other place.
        """
        return not self.drops_first_space or any(map(self.token_bytes, token_ids))

    def special_names(self) -> Iterator[tuple[int, str]]:
        """The ids and names of the special tokens."""
        return ((i, name) for name in self._special if (i := self.special_id(name)) is not None)

    def special_id(self, name: str) -> int | None:
        """The id of the special token with this name; None if there is none or it is not special."""
        return self._tokenizer.token_to_id(name) if name in self._special else None

    def special_texts(self, names: Iterable[str]) -> dict[int, TokenText]:
        """The special tokens among `names`, by id, each with its name as its text."""
        ids = {name: self.special_id(name) for name in names}
        texts = {i: name.encode() for name, i in ids.items() if i is not None}
        return {i: TokenText(data, data) for i, data in texts.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text; empty for a special token, or an id without a token."""
        text = self.token_text(token_id)
        return b"" if text is None else text.data

    def token_text(self, token_id: int) -> TokenText | None:
        """A token's share of a text; None for a special token, or an id without a token."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = self._look_up(token_id)
            return text

    def _look_up(self, token_id: int) -> TokenText | None:
        try:
            token = self.token_name(token_id)
        except BaseException as error:  # this is the scheduler's thread, which all other requests need
            if not is_failure(error):
                raise
            return TokenText("\ufffd".encode(), "\ufffd".encode())
        if token is None or token in self._special:
            return None
        return self._decoder.token_text(token)


@contextmanager
def _encoding(what: str) -> Iterator[None]:
    """Raise InvalidPrompt for a text that the library cannot encode, where it may also panic."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise InvalidPrompt(f"the tokenizer cannot encode the {what}: {error}", param="prompt") from error


def _read_json(path: Path) -> tokenizers.Tokenizer:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotACheckpoint(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise CorruptFile(f"{path} has more than {_MAX_FILE_BYTES} bytes, too many for a tokenizer")
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:  # the library raises plain Exception, and may panic
        if not is_failure(error):
            raise
        raise CorruptFile(f"{path} is not a tokenizer's file: {error}") from error


class TextStream:
    """Turns a request's tokens into text as they arrive; an `orca_jax.request.request.OutputSink`.

    No part of a stop string is ever released, nor anything after it. A possible beginning of one is held back
    until it is decided, as are the first bytes of an incomplete character. Stop strings count only after the
    first `min_tokens` tokens. The outputs of a request share its StopStrings. With `continuing` the text
    follows other text, such as a prompt, and keeps the first space that SentencePiece would drop. `shown` has
    the text of special tokens that belong to the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | StopStrings = (),
        *,
        min_tokens: int = 0,
        continuing: bool = False,
        shown: Mapping[int, TokenText] | None = None,
    ) -> None:
        self.stopped = False
        self.stop_string: str | None = None  # the stop string that ended the text
        self._shown = shown or {}
        self._n_early = min_tokens
        self._tokenizer = tokenizer
        self._decoder = tokenizer.text_decoder(continuing=continuing)
        stops = stop if isinstance(stop, StopStrings) else StopStrings(stop) if stop else None
        self._stops = None if stops is None else StopSearch(stops)
        self._held = ""
        self._safe: list[str] = []
        self._n_taken = 0  # pieces of `_safe`

    @property
    def text(self) -> str:
        """All text released so far, taken or not."""
        return "".join(self._safe)

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string is complete."""
        if not self.stopped:
            token = self._shown.get(token_id) or self._tokenizer.token_text(token_id)
            if token is not None:
                self._feed(self._decoder.push(token))
            self._n_early = max(0, self._n_early - 1)
        return self.stopped

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._safe[self._n_taken :])
        self._n_taken = len(self._safe)
        return text

    def finish(self) -> None:
        """Release the text that was held back, unless a stop string ended the request."""
        if not self.stopped:
            self._feed(self._decoder.finish())
            self._safe.append(self._held)
            self._held = ""

    def _feed(self, text: str) -> None:
        if self._stops is None or self._n_early:
            self._safe.append(text)
            return
        held = self._held + text
        match = self._stops.feed(text)
        if match is not None:
            end, length = match
            begin = len(self._held) + end - length
            self._safe.append(held[:begin])
            self.stop_string = held[begin : begin + length]
            self._held = ""
            self.stopped = True
        else:
            n_safe = len(held) - self._stops.n_open
            self._safe.append(held[:n_safe])
            self._held = held[n_safe:]
