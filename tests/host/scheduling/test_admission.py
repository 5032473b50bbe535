"""A queued request never holds more memory than its weight says."""

import tracemalloc
from typing import Any

import pytest

from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import weight_in_bytes
from orca_jax.scheduling.prefix_cache import chain_hashes, root_hash
from orca_jax.service.prepared_params import RuleMaker
from tests.gpt_config import gpt_config
from tests.host.engines import LETTERS

MODEL = gpt_config(vocab_size=300_000, n_positions=1 << 20, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8)
MAKER = RuleMaker(MODEL, LETTERS)


def many(n: int, length: int, character: str = "x") -> list[str]:
    return [
        f"{i:04}".translate({48 + d: chr(ord(character) + d) for d in range(10)})[:length] for i in range(n)
    ]


def long(n: int, length: int) -> list[str]:
    return ["".join(chr(0x4E00 + (i * 1000 + k) % 20_000) for k in range(length)) for i in range(n)]


FIELDS: dict[str, Any] = {
    "nothing": lambda: {},
    "bias": lambda: {"logit_bias": {1000 + i: i / 8192 for i in range(4096)}},
    "allowed": lambda: {"allowed_token_ids": list(range(1000, 257_000))},
    "stop ids": lambda: {"stop_token_ids": list(range(1000, 1256))},
    "stop": lambda: {"stop": long(16, 1024)},
    "short stop": lambda: {"stop": [chr(0x4E00 + i) for i in range(16)]},
    "bad words": lambda: {"bad_words": long(8, 1024)},
    "many bad words": lambda: {"bad_words": long(256, 32)},
    "short bad words": lambda: {"bad_words": [chr(0x4E00 + i) for i in range(256)]},
}


@pytest.mark.parametrize("make", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("n_prompt", [1, 131_072])
def test_a_request_holds_no_more(make: Any, n_prompt: int) -> None:
    MAKER.rules(SamplingParams(**make()))  # what is made once stays out of it
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        prompt_ids = tuple(range(1000, 1000 + n_prompt))
        rules = MAKER.rules(SamplingParams(**make()))
        held = [rules.text_stream(), rules.constraint()]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    weight = weight_in_bytes(prompt_ids, rules.sampling)
    assert after - before <= weight <= 6 * (after - before) + 8192, after - before
    assert len(held) == 2


def test_the_hashes_of_a_prompt_count() -> None:
    prompt_ids = [5] * 4096
    before = weight_in_bytes(prompt_ids, SamplingParams())
    root = root_hash("", "")
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        shared = tuple(chain_hashes(root, prompt_ids, 1))
        of_the_request = list(shared)
        end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(of_the_request) == 4096
    assert end - start <= weight_in_bytes(prompt_ids, SamplingParams(), 4096) - before


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": '{"type": "string", "pattern": "%s"}' % ("x" * 3000)},
        {"guided_regex": "é" * 4000},
        {"guided_choice": ["\U0001f600" * 1000] * 60},
        {"guided_grammar": 'start: "' + "x" * 8000 + '"'},
    ],
)
def test_a_grammars_text_counts(fields: dict[str, Any]) -> None:
    sampling = SamplingParams(**fields)
    n_characters = sum(
        len(text) for value in fields.values() for text in ([value] if isinstance(value, str) else value)
    )
    assert weight_in_bytes([], sampling) - weight_in_bytes([], SamplingParams()) >= 4 * n_characters
