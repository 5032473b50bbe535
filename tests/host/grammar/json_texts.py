"""Whether a grammar takes a JSON value, which may be spelled in several ways; a token is a byte here."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from orca_jax.grammar.grammar import Grammar, GrammarCompiler
from orca_jax.request.sampling_params import SamplingParams
from tests.host.engines import LETTERS

END, N_TOKENS = 256, 257
COMPILER = GrammarCompiler(LETTERS, vocab_size=N_TOKENS, eos_token_ids=[END])


def compiled(schema: Any) -> Grammar:
    """Raises InvalidSamplingParameter."""
    grammar = COMPILER.compile(SamplingParams(guided_json=json.dumps(schema)))
    assert grammar is not None
    return grammar


def takes(grammar: Grammar, text: str) -> bool:
    """Whether the text, byte by byte, is a whole output."""
    state, mask = grammar.start(), np.zeros(-(-N_TOKENS // 32), np.int32)
    tokens = list(text.encode())
    for i, token in enumerate(tokens):
        state.allowed(mask)
        assert state.failure is None
        if not mask[token // 32] >> (token % 32) & 1:
            return False
        if state.accept(token):
            assert state.failure is None
            return i == len(tokens) - 1
    state.allowed(mask)
    assert state.failure is None
    return bool(mask[END // 32] >> (END % 32) & 1)


def next_bytes(grammar: Grammar, begun: str) -> bytes:
    """Bytes that may follow the beginning of an output."""
    state, mask = grammar.start(), np.zeros(-(-N_TOKENS // 32), np.int32)
    assert not any(state.accept(token) for token in begun.encode())
    state.allowed(mask)
    assert state.failure is None
    return bytes(i for i in range(END) if mask[i // 32] >> (i % 32) & 1)


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def takes_value(grammar: Grammar, value: Any) -> bool:
    """Whether it takes the value in some spelling.

    Spellings differ in the order of keys, 1 for 1.0, and 0.50 for 0.5 (as for multiples of 0.25).
    """
    texts = [spelled(each) for each in itertools.islice(spellings(value), 720)]
    texts += [longer for text in texts if (longer := re.sub(r"(\d\.\d)\b", r"\g<1>0", text)) != text]
    return any(takes(grammar, text) for text in texts)


def spellings(value: Any) -> Iterator[Any]:
    """The same value with the keys of objects in every order, and 1 for 1.0."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for values in itertools.product(*[list(spellings(value[key])) for key in keys]):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*[list(spellings(each)) for each in value]))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value
