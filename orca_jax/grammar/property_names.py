"""Matches names of properties with the patterns of a schema, as llguidance does."""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# A pattern that needs more than these is as good as one that cannot be decided.
_LIMITS = LLParserLimits(initial_lexer_fuel=50_000, step_lexer_fuel=20_000, max_lexer_states=5_000)
_COMPACT = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}


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
        """Whether the name has the pattern; False where that cannot be decided."""
        text = json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return not self._matcher.is_error() and self._matcher.validate_tokens(list(text)) == len(text)


def has_other_names(names: Iterable[str], *, inside: Iterable[str] = (), outside: Iterable[str] = ()) -> bool:
    """Whether some name that is not in `names` matches a pattern of `inside`, or without those none of
    `outside`; True where that cannot be decided.
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
