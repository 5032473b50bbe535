"""Pooled hidden states of the whole engine, against Hugging Face transformers' (tests/data/golden)."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ORCA, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.families.hf_config import read_config
from orca_jax.request.pooling import Pooling
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import split_model
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.golden import DIRECTORY, NAMES, load_golden
from tests.device.model.golden_hidden import HiddenStates, hidden_names, load_hidden

# Prompts in pieces of at most 16 tokens, decodes beside them, and blocks found again.
SPLIT = SchedulingConfig(prefill_tokens=16)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def embedding(name: str, prompt: Sequence[int], pooling: Pooling) -> Request:
    return Request(name, tuple(prompt), len(prompt) + 1, ONE_TOKEN, seed=0, pooling=pooling)


def engine_of(name: str, scheduling: SchedulingConfig = SPLIT, *, stages: int = 1, **sizes: Any) -> Harness:
    checkpoint = load_checkpoint(DIRECTORY / name, dtype=jnp.float32)
    model, whole = checkpoint.config, -(-checkpoint.config.n_positions // 8) * 8
    defaults: dict[str, Any] = {"max_batch_size": 4, "n_slots": 5 * whole, "max_batch_tokens": whole}
    serving = ServingConfig(**(defaults | sizes), block_size=8, scheduling=scheduling)
    parts = split_model(model, jax.devices(), ParallelConfig(pipeline_parallel=stages))
    buckets = None if serving.deterministic else (serving.max_batch_tokens,)
    return harness(model, checkpoint.parameters, serving, parts=parts, buckets=buckets)


def assert_pooled(request: Request, expected: np.ndarray) -> None:
    assert request.pooled_vector is not None, request.request_id
    np.testing.assert_allclose(request.pooled_vector, expected, rtol=0, atol=1e-4, err_msg=request.request_id)


def play_all(engine: Harness, golden: HiddenStates, name: str) -> list[Request]:
    """Embed all prompts with both poolings, among generations, and again from the prefix cache."""
    asked = [
        embedding(f"{pooling} {i} {time}", prompt, pooling)
        for time in ("first", "again")
        for pooling in ("last", "mean")
        for i, prompt in enumerate(golden.prompts)
    ]
    outputs = load_golden(name)
    rows = [i for i, prompt in enumerate(outputs.prompts) if len(prompt) < 20][:3]
    others = [greedy_request(f"g{i}", outputs.prompts[i], len(outputs.outputs[i])) for i in rows]
    n = len(asked) // 2
    engine.run([*others, *asked], [0] * len(others) + [1] * n + [30] * n)
    for request in asked:
        pooling, i, _ = request.request_id.split()
        assert_pooled(request, (golden.last if pooling == "last" else golden.mean)[int(i)])
    for i, other in zip(rows, others, strict=True):
        sure = outputs.sure(i)
        assert tuple(other.output_ids[: len(sure)]) == sure
    return asked


QUICK = ("gemma2-caps", "gpt2-sharded-relu", "qwen2-tied")


@pytest.mark.matrix(but=["gemma2-caps"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in hidden_names()]
)
def test_they_are_those_of_hugging_face(name: str) -> None:
    golden, engine = load_hidden(name), engine_of(name)
    asked = play_all(engine, golden, name)
    assert max(request.n_iterations for request in asked) > 1  # in pieces
    cached = {request.request_id: request.n_cached for request in asked}
    found = any(n for key, n in cached.items() if key.startswith("last") and key.endswith("again"))
    # Blocks have no state of recurrent layers, so a hybrid finds none.
    assert found is not read_config(load_golden(name).directory).has_state
    assert not any(n for key, n in cached.items() if key.startswith("mean"))


def test_every_family_is_there() -> None:
    """A new family needs scripts/golden/hidden.py, after scripts/golden/decoders.py."""
    families = [
        {json.loads((DIRECTORY / name / "config.json").read_text())["model_type"] for name in names}
        for names in (NAMES, hidden_names())
    ]
    assert families[0] == families[1]
    assert len(families[0]) >= 16


@pytest.mark.parametrize(
    ("scheduling", "options"),
    [
        pytest.param(ORCA, {}, id="orca"),
        pytest.param(ORCA, {"overlap": False, "max_batch_size": 1}, id="alone"),
        pytest.param(ORCA, {"deterministic": True}, id="deterministic"),
        pytest.param(SPLIT, {"stages": 2}, id="two stages"),
        pytest.param(SPLIT, {"n_slots": 80}, id="preempted"),
    ],
)
def test_under_each_policy_and_partition(scheduling: SchedulingConfig, options: dict[str, Any]) -> None:
    name = "opt-no-final-norm-projection"  # its embeddings are larger than its hidden states
    engine = engine_of(name, scheduling, **options)
    play_all(engine, load_hidden(name), name)
    assert (engine.scheduler.n_preemptions > 0) == (options == {"n_slots": 80})


def test_after_a_loss_nothing_is_counted_twice() -> None:
    name = "gpt2-sharded-relu"
    golden, engine = load_hidden(name), engine_of(name)
    longest = int(np.argmax([len(prompt) for prompt in golden.prompts]))
    asked = embedding("again", golden.prompts[longest], "mean")
    engine.pool.add(greedy_request("other", (1, 2, 3), 60))  # so that prompts come in pieces
    for _ in range(2):
        engine.scheduler.step()
    engine.pool.add(asked)
    while asked.pooled is None:
        engine.scheduler.step()
    assert 0 < asked.n_computed < len(asked.prompt_ids)
    run_again(engine.scheduler)
    engine.run([])
    assert_pooled(asked, golden.mean[longest])


def test_a_deterministic_engine_gives_the_same_bits_whatever_else_runs() -> None:
    name = "gpt2-sharded-relu"
    golden, engine = load_hidden(name), engine_of(name, ORCA, deterministic=True)

    def bits(numbers: Sequence[int]) -> dict[int, bytes]:
        asked = {i: embedding(str(i), golden.prompts[i], "mean") for i in numbers}
        engine.run(list(asked.values()))
        vectors = {i: request.pooled_vector for i, request in asked.items()}
        return {i: vector.tobytes() for i, vector in vectors.items() if vector is not None}

    together = bits(range(len(golden.prompts)))
    assert together == bits(range(len(golden.prompts))[::-1])
    for i in range(len(golden.prompts)):
        assert bits([i]) == {i: together[i]}
