"""LoRA adapters by request: logits and tokens equal PEFT's, in batches that mix adapters and none."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, UnknownAdapter
from orca_jax.families.parameters import parameter_table
from tests.whole.adapters.golden_adapters import (
    DRAWN,
    NAMES,
    Expected,
    GoldenAdapters,
    load_golden_adapters,
)

# All requests of a test run in one batch, so that few programs are compiled.
SIZES: dict[str, Any] = {
    "max_batch_size": 12,
    "n_slots": 1024,
    "max_batch_tokens": 128,
    "prefill_tokens": 128,
    "max_loras": 2,  # fewer than a Llama has here, so that some requests wait for their adapter
}
CLOSE = 1e-4
N_TOP = 5
BLOCK = 16


EIGHT = "llama3-rope-tied"  # with adapters of ranks 4 to 64
# A model, and how it is split.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in NAMES},
    "two devices": ("llama-grouped", {"tensor_parallel": 2}),
    "two stages": ("llama-grouped", {"pipeline_parallel": 2}),
}
Engine = tuple[LLM, list[tuple[str | None, Expected]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each == "llama-grouped" else pytest.mark.matrix) for each in ENGINES
    ],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, split = ENGINES[request.param]
    golden = load_golden_adapters(name)
    with LLM(golden.model, adapters=golden.directories, **SIZES, **split) as llm:
        yield llm, all_of(golden)


def all_of(golden: GoldenAdapters) -> list[tuple[str | None, Expected]]:
    """PEFT's results, one adapter's after the other's."""
    return [(name or None, each) for name, every in golden.expected.items() for each in every]


def test_mixed_batches_give_pefts_logits_and_the_merged_models_tokens(engine: Engine):
    check(*engine)


@pytest.mark.matrix
@pytest.mark.parametrize("name", DRAWN)
def test_each_family(name: str, tmp_path: Path) -> None:
    golden = load_golden_adapters(name, tmp_path)
    sizes: dict[str, Any] = SIZES | ({"max_loras": 8, "max_batch_size": 27} if name == EIGHT else {})
    with LLM(golden.model, adapters=golden.directories, **sizes) as llm:
        check(llm, all_of(golden))


def check(llm: LLM, mixed: Sequence[tuple[str | None, Expected]]) -> None:
    """Compare one batch of all prompts with PEFT's results."""
    encoded = mixed[0][1].encoded
    params = SamplingParams(
        max_tokens=6,
        temperature=0.0,
        ignore_eos=True,
        logprobs=N_TOP,
        prompt_logprobs=None if encoded else 0,
    )
    results = llm.generate([each.prompt for _, each in mixed], params, adapter=[name for name, _ in mixed])
    for (name, each), result in zip(mixed, results, strict=True):
        assert result.token_ids[: len(each.outputs)] == each.outputs, name
        assert result.logprobs is not None
        scored = result.logprobs[: len(each.outputs)] if encoded else result.prompt_logprobs
        assert scored is not None
        scores, free = np.array([token.logprob for token in scored]), each.scores[: len(scored)] <= 0
        np.testing.assert_allclose(scores[free], each.scores[free], atol=CLOSE, err_msg=str(name))
        if encoded and len(each.outputs) < 2:
            continue
        top = dict(result.logprobs[int(encoded)].top)
        assert top.keys() == each.top.keys()
        for token_id, logprob in each.top.items():
            assert abs(top[token_id] - logprob) < CLOSE, name
    outputs = {name: [each.outputs for other, each in mixed if other == name] for name, _ in mixed}
    assert len({str(one) for one in outputs.values()}) == len(outputs), "adapters change the tokens"


def test_the_prefix_cache_keeps_adapters_apart(engine: Engine):
    """Once each adapter has computed each prompt, a request finds the blocks of its own adapter only."""
    llm, mixed = engine
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    names = [name for name, _ in mixed]
    llm.generate([each.prompt for _, each in mixed], params, adapter=names)
    results = llm.generate([each.prompt for _, each in mixed], params, adapter=names)
    for (name, each), result in zip(mixed, results, strict=True):
        assert result.token_ids[: len(each.outputs)] == each.outputs, name
        assert result.n_cached == (len(each.prompt) - 1) // BLOCK * BLOCK
    assert any(result.n_cached for result in results)


@pytest.mark.matrix
def test_adapters_come_and_go_while_the_engine_runs(engine: Engine) -> None:
    llm, mixed = engine
    name, each = next(pair for pair in mixed if pair[0] is not None and pair[1].outputs)
    assert name is not None
    directory = llm.service.adapters[name].directory
    params = SamplingParams(max_tokens=len(each.outputs), temperature=0.0, ignore_eos=True)
    with pytest.raises(ConfigError, match=r"an adapter .* already; unload it first"):
        llm.load_adapter(name, directory)
    llm.load_adapter("new", directory)
    stream = llm.stream(each.prompt, params, adapter="new")
    llm.unload_adapter("new")  # the request that has it goes on
    assert stream.result().token_ids == each.outputs
    assert "new" not in llm.adapters
    with pytest.raises(UnknownAdapter, match="no adapter 'new'"):
        llm.stream(each.prompt, params, adapter="new")


def test_an_unknown_adapter_is_named(engine: Engine):
    llm, _ = engine
    wrong = f"{next(iter(llm.adapters))}x"
    with pytest.raises(UnknownAdapter, match=rf"no adapter '{wrong}' here; .*did you mean {wrong[:-1]}"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=1), adapter=wrong)


@pytest.mark.matrix
def test_a_trainers_arrays_become_an_adapter(engine: Engine) -> None:
    """A trainer's adapter has the tokens of its arrays merged into the model."""
    llm, mixed = engine
    prompt = next(each.prompt for _, each in mixed)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (base,) = llm.generate(prompt, params)
    chance, shape = np.random.default_rng(7), parameter_table(llm.config)["layers.1.out.weight"].shape
    arrays = {
        "layers.1.out.weight.lora_a": chance.standard_normal((3, *shape[1:])).astype(np.float32),
        "layers.1.out.weight.lora_b": chance.standard_normal((*shape[:1], 3)).astype(np.float32),
    }
    nothing = {name: 0 * array for name, array in arrays.items()}
    version = llm.update_weights(arrays, adapter="trained", lora_scale=0.25)
    (trained,) = llm.generate(prompt, params, adapter="trained")
    assert llm.update_weights(nothing, adapter="trained") > version
    (again,) = llm.generate(prompt, params, adapter="trained")
    llm.unload_adapter("trained")
    assert again.token_ids == base.token_ids != trained.token_ids
    llm.update_weights(arrays, lora_scale=0.25)
    (merged,) = llm.generate(prompt, params)
    llm.update_weights(nothing)
    assert merged.token_ids == trained.token_ids
