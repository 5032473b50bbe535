"""Every generation parameter at once over two worker processes, and after one of them is killed."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.service.generation import GenerationResult
from tests.whole.workers.worker_harness import N_OUTPUT, N_POSITIONS, SOON, write_model

SIZES: dict[str, Any] = {
    "max_batch_size": 12,
    "max_batch_tokens": N_POSITIONS,
    "n_slots": 1600,
    "dtype": "float32",
}
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.2, "temperature": 0.5},
    {"presence_penalty": -1.0},
    {"logit_bias": {65: 9.0, 66: 8.0}},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {128: 60.0}},
    {"allowed_token_ids": tuple(range(97, 105))},
    {"bad_words": ("a", "bc", "d")},
    {"stop_token_ids": (70,), "logit_bias": {70: 5.0}},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"guided_regex": "[a-d]{5,12}x?", "temperature": 1.0},
    {"guided_json": {"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 4}, "temperature": 1.0},
    {"guided_choice": ("alpha", "beta", "gamma"), "temperature": 1.0, "logprobs": 1},
]
STARTED = re.compile(r"its process \(pid (\d+)\) was started")
PROMPTS = [f"p{chr(65 + i)}x" for i in range(len(ASKED))]


def asked() -> list[SamplingParams]:
    common = {"max_tokens": N_OUTPUT, "temperature": 0.0, "ignore_eos": True}
    return [SamplingParams(**{**common, "seed": i, **fields}) for i, fields in enumerate(ASKED)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("parameters"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[GenerationResult]]:
    with LLM(model, **SIZES) as llm:
        yield llm.generate(PROMPTS, asked())


def assert_same(result: list[GenerationResult], expected: list[GenerationResult]) -> None:
    for i, (one, wanted) in enumerate(zip(result, expected, strict=True)):
        assert (one.text, one.finish_reason) == (wanted.text, wanted.finish_reason), ASKED[i]
        for of in ("logprobs", "prompt_logprobs"):
            mine: list[TokenLogprobs] | None = getattr(one, of)
            theirs: list[TokenLogprobs] | None = getattr(wanted, of)
            assert (mine is None) == (theirs is None) == (getattr(asked()[i], of) is None)
            for ours, exact in zip(mine or [], theirs or [], strict=True):
                assert ours.token_id == exact.token_id
                np.testing.assert_allclose(ours.logprob, exact.logprob, atol=1e-4)
                np.testing.assert_allclose([p for _, p in ours.top], [p for _, p in exact.top], atol=1e-4)


@pytest.mark.long
def test_two_processes_give_one_s_output_even_after_a_kill(
    model: Path, expected: list[GenerationResult]
) -> None:
    assert len({result.text for result in expected}) == len(ASKED)
    assert re.fullmatch("[a-d]{5,12}x?", expected[12].text)
    events: list[str] = []

    def pids() -> list[int]:
        """Ids of the started processes, in order."""
        return [int(match[1]) for line in events if (match := STARTED.search(line))]

    # The outputs repeat their text, and some follow a grammar, so that there are drafts.
    processes = {"worker_processes": True, "pipeline_parallel": 2, "speculative": "ngram"}
    with LLM(model, on_event=events.append, **processes, **SIZES) as llm:
        assert_same(llm.generate(PROMPTS, asked()), expected)
        assert len(pids()) == 2
        running = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, asked(), strict=True)]
        for stream in running:  # all of them are in the middle of their output, or were short
            stream.next_piece(SOON)
        os.kill(pids()[1], signal.SIGKILL)
        assert_same([stream.result(SOON) for stream in running], expected)
        assert len(pids()) == 3, "another was started for it"
        assert llm.service.speculation is not None and llm.service.speculation.n_accepted > 10
