"""LLM.score: the log-probabilities of existing texts, and its refusals."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import (
    EmptyPrompt,
    InvalidPrompt,
    InvalidSamplingParameter,
    InvalidSchedulingParameter,
    PromptTooLong,
    TokenOutOfRange,
)
from orca_jax.model.reference import forward
from tests.whole.commands.test_llm import at_rest

LISTS = [[7], [1, 2], list(range(64)), [200, 3, 3, 3, 259]]


def test_they_are_the_reference_models(tiny: LLM, tiny_directory: Path) -> None:
    loaded = load_checkpoint(tiny_directory, dtype="float32")
    run = jax.jit(forward, static_argnums=0)
    scores = tiny.score([*LISTS, np.array(LISTS[3])], n_prompt=np.array([1, 1, 64, 2, 3]))
    for token_ids, ours in zip([*LISTS, LISTS[3]], scores, strict=True):
        padded = jnp.array(token_ids + [0] * (64 - len(token_ids)))
        exact = log_softmax(np.asarray(run(loaded.config, loaded.parameters, padded), np.float64), axis=-1)
        np.testing.assert_allclose(ours, exact[np.arange(len(token_ids) - 1), token_ids[1:]], atol=1e-4)
    assert tiny.score([]) == []
    assert at_rest(tiny)


@pytest.mark.parametrize(
    ("lists", "options", "error", "message"),
    [
        ([[1], []], {}, EmptyPrompt, "list 1: the prompt has no tokens"),
        ([[1, 260]], {}, TokenOutOfRange, "list 0: token id 260 is not in the vocabulary"),
        ([[1, -1]], {}, TokenOutOfRange, "list 0: token id -1"),
        ([[1, 2], [3] * 66], {}, PromptTooLong, "list 1: the prompt has 65 tokens"),
        (["text"], {}, InvalidPrompt, "list 0: a text cannot be scored"),
        ([[1, 2.5]], {}, InvalidPrompt, "list 0: element 1 of the prompt is 2.5"),
        (
            [[1, 2]],
            {"n_prompt": 3},
            InvalidSamplingParameter,
            "n_prompt is 3; it must be from 1 to the number",
        ),
        ([[1, 2]], {"n_prompt": 0}, InvalidSamplingParameter, "n_prompt is 0"),
        ([[1, 2]], {"n_prompt": [1, 1]}, InvalidSamplingParameter, "there are 2 n_prompt for 1 lists"),
        ([[1, 2]], {"priority": 1}, InvalidSchedulingParameter, "'fcfs'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    tiny: LLM, lists: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    n_before = len(tiny.service.timeline.iterations)
    with pytest.raises(error, match=message):
        tiny.score(lists, **options)
    assert len(tiny.service.timeline.iterations) == n_before


def test_a_deterministic_engine_repeats_its_outputs(tiny_directory: Path) -> None:
    """Whatever else runs: outputs are scored alone, all together, and among new requests."""
    prompts = [[1], [5, 6, 7], list(range(40)), [9] * 12]
    asked = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1, seed=3)
    with LLM(tiny_directory, max_batch_size=4, max_batch_tokens=64, n_slots=640, deterministic=True) as llm:
        results = llm.generate(prompts, asked)
        listed = [prompt + result.token_ids for prompt, result in zip(prompts, results, strict=True)]
        said = [
            [token.logprob for token in (*(result.prompt_logprobs or ()), *(result.logprobs or ()))]
            for result in results
        ]
        lengths = [len(prompt) for prompt in prompts]
        assert llm.score(listed, n_prompt=lengths) == said
        streams = [llm.stream(prompt, asked) for prompt in reversed(prompts)]
        assert llm.score(listed[::-1], n_prompt=lengths[::-1]) == said[::-1]
        assert [stream.result(60.0).token_ids for stream in reversed(streams)] == [
            r.token_ids for r in results
        ]
        for token_ids, n_prompt, expected in zip(listed, lengths, said, strict=True):
            assert llm.score([token_ids], n_prompt=n_prompt) == [expected]
        # All of a list as a prompt: what `generate` says of that prompt.
        one = SamplingParams(max_tokens=1, prompt_logprobs=0)
        as_prompts = [result.prompt_logprobs or [] for result in llm.generate(listed, one)]
        assert llm.score(listed) == [[token.logprob for token in prompt] for prompt in as_prompts]
