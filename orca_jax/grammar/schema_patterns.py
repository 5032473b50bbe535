"""Translates the patterns and formats of JSON schemas for llguidance, and matches property names with them.

JSON Schema has ECMAScript's syntax, llguidance Rust's; this file knows the differences.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from orca_jax.grammar.schema_document import CannotFollow

# Formats that llguidance follows. One that is neither here nor in FORMATS is an annotation.
LIBRARY_FORMATS = frozenset({"duration", "email", "ipv4", "uri"})

_YEAR = "[0-9]{4}"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])"
# A label: up to 63 ASCII letters, digits and hyphens; not an encoded one (`xn--`), whose rules are tables.
_ANY, _END = "[0-9A-Za-z-]", "[0-9A-Za-z]"
_THIRD_AND_FOURTH = f"(?:{_ANY}{_END}|{_END}-)"
_LABEL = f"{_END}(?:{_END}|{_ANY}(?:{_END}|{_ANY}{_END}|{_THIRD_AND_FOURTH}{_ANY}{{0,58}}{_END}))?"
# RFC 3986, section 3.2.2, whose last 32 bits may be an IPv4 address; llguidance's has none.
_BYTE, _GROUP = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])", "[0-9A-Fa-f]{1,4}"
_LAST = rf"(?:{_GROUP}:{_GROUP}|(?:{_BYTE}\.){{3}}{_BYTE})"
_ENDINGS = (*(f"(?:{_GROUP}:){{{5 - n}}}{_LAST}" for n in range(6)), _GROUP, "")
_IPV6 = "|".join(
    (
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::{_ENDINGS[0]}",
        *(f"(?:(?:{_GROUP}:){{0,{n - 1}}}{_GROUP})?::{_ENDINGS[n]}" for n in range(1, 8)),
    )
)

# Formats with patterns of our own: dates that exist, and no leap seconds, which most programs cannot read.
FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
MAX_HOSTNAME = 253  # characters, which its pattern does not count

_SPACES = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_NOTHING, _ANYTHING = r"[^\s\S]", r"[\s\S]"

# A pattern that needs more counts as undecidable.
_LIMITS = LLParserLimits(initial_lexer_fuel=50_000, step_lexer_fuel=20_000, max_lexer_states=5_000)
_COMPACT = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}

_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_PAIR = re.compile(r"\\u[dD]([89abAB][0-9a-fA-F]{2})\\u[dD]([c-fC-F][0-9a-fA-F]{2})")
_BY_NUMBER = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_CLASS = re.compile(r"\\[pP]\{[^{}]*\}")
_CONTROL = re.compile(r"\\c([a-zA-Z])")
_NUL = re.compile(r"\\0(?!\d)")


def is_writable(text: str) -> bool:
    """Whether an output's string can hold this text: outputs have no JSON escapes by number."""
    return not any(map(_is_unwritable, text))


def _is_unwritable(character: str) -> bool:
    return (character < " " and character not in "\b\t\n\f\r") or character == "\x7f"


def rust_pattern(pattern: str) -> str:
    """Translate a pattern for llguidance, which itself refuses what neither dialect knows.

    Raises CannotFollow. Takes time linear in the length. Characters that no output can have are removed from
    classes and match nothing elsewhere; llguidance would drop them from the text instead.
    """
    parts, i = list[str](), 0
    while i < len(pattern):
        if pattern[i] == "[":
            part, i = _class(pattern, i)
        elif pattern[i] == "{" and not _QUANTIFIER.match(pattern, i):
            part, i = r"\{", i + 1
        else:
            atom = _atom(pattern, i, in_class=False)
            part, i = _NOTHING if atom.is_unwritable else atom.text, atom.end
        parts.append(part)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Atom:
    """A character or an escape: its Rust form, where it ends, and which character it is."""

    text: str
    end: int
    character: str | None = None

    @property
    def is_unwritable(self) -> bool:
        return self.character is not None and _is_unwritable(self.character)


def _class(pattern: str, i: int) -> tuple[str, int]:
    """Translate the class that begins at `i`; returns it and where it ends."""
    start = i
    i += 2 if pattern.startswith("[^", i) else 1
    head, parts = pattern[start:i], list[str]()
    while i < len(pattern) and pattern[i] != "]":
        first = last = _atom(pattern, i, in_class=True)
        if pattern[first.end : first.end + 1] == "-" and pattern[first.end + 1 : first.end + 2] not in (
            "",
            "]",
        ):
            last = _atom(pattern, first.end + 1, in_class=True)
        i = last.end
        if first is last:
            parts.append("" if first.is_unwritable else first.text)
        elif first.character is None or last.character is None:  # not a range, but a hyphen between two
            parts.append(rf"{first.text}\-{last.text}")
        elif last.character < "\b" or "\r" < first.character <= last.character < " ":
            pass  # a range of nothing that an output can have
        else:
            parts.append(f"{first.text}-{last.text}")
    if i == len(pattern):
        return pattern[start:], i  # unfinished
    if any(parts):
        return f"{head}{''.join(parts)}]", i + 1
    return _ANYTHING if head == "[^" else _NOTHING, i + 1


def _atom(pattern: str, i: int, *, in_class: bool) -> _Atom:
    """The character or escape at `i`."""
    if pattern[i] != "\\":
        # Classes inside of classes, and operators of sets, are Rust's alone.
        is_special = in_class and pattern[i] in "[&~-"
        return _Atom(f"\\{pattern[i]}" if is_special else pattern[i], i + 1, pattern[i])
    pair = _PAIR.match(pattern, i)
    if pair:
        high, low = int(pair[1], 16) - 0x800, int(pair[2], 16) - 0xC00
        return _of_character(chr(0x10000 + (high << 10) + low), pair.end())
    number = _BY_NUMBER.match(pattern, i)
    if number and int(number[number.lastindex or 0], 16) <= 0x10FFFF:
        return _of_character(chr(int(number[number.lastindex or 0], 16)), number.end())
    control = _CONTROL.match(pattern, i)
    if control:
        return _of_character(chr(ord(control[1]) % 32), control.end())
    nul = _NUL.match(pattern, i)
    if nul:
        return _of_character("\0", nul.end())
    name = _CLASS.match(pattern, i)
    if name:
        return _Atom(name[0], name.end())
    letter, end = pattern[i + 1 : i + 2], i + 2
    if not letter:
        raise CannotFollow("in a regular expression: it ends with a backslash")
    if letter == "s":
        return _Atom(_SPACES if in_class else f"[{_SPACES}]", end)
    if letter == "S":
        return _Atom(f"[^{_SPACES}]", end)
    if letter == "b" and in_class:
        return _of_character("\b", end)
    if letter in _NAMED:
        return _of_character(_NAMED[letter], end)
    if letter in ("<", ">"):  # the ends of words in Rust
        return _Atom(letter, end, letter)
    return _Atom(pattern[i:end], end, None if letter.isalnum() else letter)


_NAMED = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}


def _of_character(character: str, end: int) -> _Atom:
    return _Atom(rf"\u{{{ord(character):x}}}" if character not in _PLAIN else character, end, character)


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _/:;,<>=!@%'\"`")


# Property names against patterns.


class _Bytes:
    """A tokenizer with a token for each byte."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = ()
    tokens = (*(bytes([i]) for i in range(256)), b"")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _matcher(schema: Mapping[str, Any]) -> LLMatcher:
    text = json.dumps({**schema, "x-guidance": _COMPACT})
    return LLMatcher(
        _tokenizer(),
        json.dumps({"grammars": [{"json_schema": json.loads(text)}]}),
        log_level=0,
        limits=_LIMITS,
    )


class NamePattern:
    """A pattern of `patternProperties`, in Rust's form."""

    def __init__(self, pattern: str) -> None:
        self._matcher = _matcher({"type": "string", "pattern": pattern})

    def matches(self, name: str) -> bool:
        """Whether the name matches; False if that cannot be decided."""
        text = json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return not self._matcher.is_error() and self._matcher.validate_tokens(list(text)) == len(text)


def has_other_names(names: Iterable[str], *, inside: Iterable[str] = (), outside: Iterable[str] = ()) -> bool:
    """Whether a name outside `names` matches a pattern of `inside`, or if that is empty, none of `outside`.

    True if that cannot be decided.
    """
    patterns = dict.fromkeys(inside, True)
    additional = not patterns
    patterns |= dict.fromkeys(outside, False)
    matcher = _matcher(
        {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": patterns,
            "additionalProperties": additional,
        }
    )
    if matcher.is_error() or not matcher.consume_token(ord("{")):
        return True
    mask = matcher.compute_bitmask()
    return matcher.is_error() or bool(mask[ord('"') // 8] >> (ord('"') % 8) & 1)
