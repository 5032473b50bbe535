"""An output's text for a parser: it arrives in pieces, and is consumed from the beginning.

A parser is a generator that yields when it needs more text. Reading consumes the text, so nothing is read
twice, and only a possible beginning of a marker waits for the next piece.
"""

import re
from collections.abc import Callable, Generator

from orca_jax.request.stop_strings import StopSearch, StopStrings

Reading = Generator[None, None, None]

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.:/-]*")
_NO_ANGLE = re.compile(r"[^<]*")
_IN_STRING = re.compile(r'[^"\\]*')
_STRUCTURE = re.compile(r'["{}\[\]]')
_WINDOW = (
    1024  # characters searched at a time, so that a piece with many markers is not copied for each of them
)
MAX_WORD = 512  # characters of a function's name, or of a key where a call may begin


class Source:
    """The text of one output, of which `offset` characters have been consumed."""

    def __init__(self) -> None:
        self.offset = 0
        self.ended = False
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        """Append a piece of the output."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def n_pending(self) -> int:
        """Characters that are not consumed yet."""
        return len(self._text) - self._at

    def record(self, before: str = "") -> None:
        """Keep what is consumed from here on, after `before`."""
        self._record = [before]

    def recorded(self) -> str:
        """Stop recording, and return what was consumed since `record`."""
        record, self._record = self._record, None
        return "".join(record or ())

    def at(self, character: str) -> Generator[None, None, bool]:
        """Whether the next character is this one. It is not consumed."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text.startswith(character, self._at)

    def marker(self, *options: str) -> Generator[None, None, str | None]:
        """Consume the option that comes next. None if none does, and then nothing is consumed."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            found = next((option for option in options if rest.startswith(option)), None)
            if found is not None:
                self._consume(len(found))
                return found
            if self.ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def close(self, *options: str) -> Generator[None, None, str | None]:
        """Like `marker`, but if the output ends within an option, that beginning is consumed."""
        found = yield from self.marker(*options)
        if found is None and self.ended:
            rest = self._text[self._at :]
            if any(option.startswith(rest) for option in options):
                self._consume(len(rest))
        return found

    def space(self) -> Reading:
        yield from self._run(_SPACE, None)

    def word(self) -> Generator[None, None, str]:
        """Consume up to MAX_WORD letters, digits and `_.:/-`."""
        return (yield from self._run(_WORD, MAX_WORD))

    def until_angle(self) -> Generator[None, None, str]:
        """Consume up to MAX_WORD characters other than `<`."""
        return (yield from self._run(_NO_ANGLE, MAX_WORD))

    def pass_text(
        self, markers: StopStrings, to: Callable[[str], object]
    ) -> Generator[None, None, str | None]:
        """Consume text up to and including the first of `markers`; the text goes to `to`.

        Returns the marker, None if the output ends without one.
        """
        search, held = StopSearch(markers), ""
        while True:
            text = self._text[self._at : self._at + _WINDOW]
            match = search.feed(text) if text else None
            if match is not None:
                end, length = match
                self._consume(end)
                passed = held + text[:end]
                self._pass(passed[:-length], to)
                return passed[-length:]
            self._consume(len(text))
            passed = held + text
            n_safe = len(passed) - search.n_open
            self._pass(passed[:n_safe], to)
            held = passed[n_safe:]
            if self._at < len(self._text):
                continue
            if self.ended:
                self._pass(held, to)
                return None
            yield

    def string(self) -> Generator[None, None, str | None]:
        """Consume a JSON string of up to MAX_WORD characters without escapes. None if there is none."""
        if (yield from self.marker('"')) is None:
            return None
        text = yield from self._run(_IN_STRING, MAX_WORD)
        return None if (yield from self.marker('"')) is None else text

    def json_object(self, to: Callable[[str], object]) -> Generator[None, None, bool]:
        """Consume a JSON object up to its closing brace, by counting brackets; fragments of it go to `to`.

        False if there is none, or if the output ends before the closing brace.
        """
        depth, in_string, escaped = 0, False, False
        if not (yield from self.at("{")):
            return False
        while True:
            text, place = self._text, self._at
            while place < len(text):
                if escaped:
                    escaped = False
                    place += 1
                elif in_string:
                    place = _end_of(_IN_STRING, text, place)
                    if place < len(text):
                        in_string, escaped = text[place] == "\\", text[place] == "\\"
                        place += 1
                else:
                    match = _STRUCTURE.search(text, place)
                    if match is None:
                        place = len(text)
                        break
                    place = match.end()
                    in_string = match[0] == '"'
                    depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
                    if not depth:
                        break
            self._pass(self._consume(place - self._at), to)
            if not depth:
                return True
            if self.ended:
                return False
            yield

    def rest(self, to: Callable[[str], object]) -> Reading:
        """Consume all text that is left."""
        while True:
            self._pass(self._consume(len(self._text) - self._at), to)
            if self.ended:
                return
            yield

    def _run(self, pattern: re.Pattern[str], most: int | None) -> Generator[None, None, str]:
        pieces, n = list[str](), 0
        while True:
            end = _end_of(pattern, self._text, self._at)
            if most is not None:
                end = min(end, self._at + most - n)
            n += end - self._at
            pieces.append(self._consume(end - self._at))
            if self._at < len(self._text) or self.ended or n == most:
                return "".join(pieces)
            yield

    def _consume(self, n: int) -> str:
        text = self._text[self._at : self._at + n]
        self._at += n
        self.offset += n
        if self._record is not None and text:
            self._record.append(text)
        return text

    def _pass(self, text: str, to: Callable[[str], object]) -> None:
        if text:
            to(text)


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    match = pattern.match(text, place)
    return place if match is None else match.end()


def stops(*markers: str) -> StopStrings:
    """Compile markers for `pass_text`."""
    return StopStrings(markers)
