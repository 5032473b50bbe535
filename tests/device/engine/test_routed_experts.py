"""The experts that requests ask for: against model/reference.py, and Hugging Face's router logits."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ORCA, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.routed_experts import ExpertIds, RoutedTokens
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.golden import DIRECTORY, MARGIN
from tests.device.model.golden_routing import load_routing, routing_names
from tests.device.model.mixture_models import mixture_model

MODEL = replace(mixture_model(hidden=32, size=16, top_k=2, n_layers=3), vocab_multiple=4)
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 40, max_batch_tokens=64, block_size=8)
BUCKETS = (8, 64)
# Prompts in pieces of at most eight tokens.
PIECES = SchedulingConfig(prefill_tokens=8)


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that routing and tokens vary, and few choices are close."""
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {
        name: value * (10 if "router" in name else 1 if value.ndim == 1 else 5) for name, value in p.items()
    }


@cache
def stages(n_stages: int, n_devices: int = 1) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    # A CPU's devices exchange tokens only if forced to.
    exchange = "exchange" if n_devices > 2 else "auto"
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=n_devices, expert_exchange=exchange)
    parts = split_model(MODEL, jax.devices(), parallel)
    engine = harness(MODEL, parameters(), SERVING, buckets=BUCKETS, parts=parts).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return parts, engine._workers.workers


def built(n_stages: int = 1, n_devices: int = 1, **options: Any) -> Harness:
    parts, workers = stages(n_stages, n_devices)
    serving = replace(SERVING, **options)
    return harness(MODEL, {}, serving, buckets=BUCKETS, parts=parts, workers=workers)


def asking(name: str, prompt: Any, n_output: int, **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True, return_routed_experts=True)
    tokens = tuple(int(token) for token in prompt)
    return Request(name, tokens, len(tokens) + n_output, replace(params, **sampling), seed=0)


def crowd(*, repeated: bool = True) -> list[Request]:
    """Requests with and without `return_routed_experts`, of prompts of 1 to 30 tokens, two of them equal."""
    rng = np.random.default_rng(1)
    asked = [asking(f"a{i}", rng.integers(0, 53, n), 7) for i, n in enumerate((1, 30, 5, 12, 22, 3))]
    again = [asking("again", asked[1].prompt_ids, 7)] if repeated else []
    return [*asked, *again, *(greedy_request(f"g{i}", (1, 2, 3 + i), 9) for i in range(2))]


@cache
def _exact_of_padded() -> Any:
    def chosen(tokens: jax.Array) -> jax.Array:
        routed = list[jax.Array]()
        reference.forward(MODEL, parameters(), tokens, routed=routed)
        return jnp.stack(routed, axis=1)

    return jax.jit(chosen)


def assert_exact(request: Request) -> None:
    """Check the experts of all tokens but the last; padding after them does not affect a causal model."""
    tokens = [*request.prompt_ids, *request.output_ids][:-1]
    padded = jnp.array(tokens + [0] * (MODEL.n_positions - len(tokens)))
    expected = np.asarray(_exact_of_padded()(padded))[: len(tokens)]
    ids = request.routed_experts
    assert ids is not None, request.request_id
    assert (ids.shape, ids.dtype) == (expected.shape, np.uint8)
    np.testing.assert_array_equal(np.sort(ids), np.sort(expected), err_msg=request.request_id)


def play(engine: Harness, requests: list[Request]) -> None:
    engine.run(requests, [3 * i for i in range(len(requests))])
    for request in requests:
        assert len(request.output_ids) == request.max_tokens - len(request.prompt_ids)
        if request.sampling.return_routed_experts:
            assert_exact(request)
        else:
            assert request.routed_experts is None


@pytest.mark.matrix(but=["pieces", "two devices"])
@pytest.mark.parametrize(
    ("stage_sizes", "options"),
    [
        pytest.param((1, 1), {"scheduling": ORCA}, id="orca"),
        pytest.param((1, 1), {"scheduling": PIECES}, id="pieces"),
        pytest.param((1, 1), {"scheduling": PIECES, "overlap": False}, id="no overlap"),
        pytest.param((2, 1), {"scheduling": PIECES}, id="two stages"),
        pytest.param((1, 2), {"scheduling": PIECES}, id="two devices"),
        pytest.param((1, 4), {"scheduling": PIECES}, id="exchanged between four", marks=pytest.mark.long),
    ],
)
def test_they_are_those_of_the_reference(stage_sizes: tuple[int, int], options: dict[str, Any]) -> None:
    requests = crowd()
    play(built(*stage_sizes, **options), requests)
    assert not any(request.n_cached for request in requests if request.sampling.return_routed_experts)


def test_each_token_is_reported_once_after_preemptions() -> None:
    engine = built(scheduling=PIECES, n_slots=56)
    requests = [asking(f"a{i}", range(i, i + 14), 20) for i in range(3)]
    engine.run(requests)
    assert engine.scheduler.n_preemptions > 0
    for request in requests:
        assert_exact(request)


@pytest.mark.parametrize("lost_before", [2, 5, 9])
def test_each_token_is_reported_once_after_a_loss(lost_before: int) -> None:
    engine, requests = built(scheduling=PIECES), crowd(repeated=False)

    def before_step(step: int) -> None:
        if step == lost_before:
            for worker in stages(1)[1]:
                worker.renew()
            run_again(engine.scheduler)

    engine.run(requests, before_step=before_step)
    for request in requests[:6]:
        assert_exact(request)


def test_tokens_after_the_end_are_not_reported() -> None:
    """With overlap, another iteration with the output's last token is in flight when the request ends."""
    first = asking("first", range(9), 8)
    built(scheduling=PIECES).run([first])
    end = first.output_ids[3]
    n_output = first.output_ids.index(end) + 1
    stopped = asking("stopped", range(9), 8)
    stopped.end_token_ids = frozenset({end})
    built(scheduling=PIECES).run([stopped, asking("longer", range(4), 12)])
    assert (len(stopped.output_ids), stopped.finish_reason) == (n_output, FinishReason.STOP)
    assert stopped.n_routed == stopped.n_tokens - 1
    assert_exact(stopped)


def test_cached_tokens_count_once_their_experts_are_known() -> None:
    """A request for experts computes a cached prompt again, but may reuse blocks with known experts."""
    engine = built(scheduling=PIECES)
    prompt = tuple(range(24))
    engine.run([greedy_request("before", prompt, 4)])
    asked, plain = asking("asked", prompt, 4), greedy_request("plain", prompt, 4)
    engine.run([asked, plain])
    assert (asked.n_cached, plain.n_cached) == (0, 16)
    assert_exact(asked)


QUICK = ("mixtral-grouped",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in routing_names()]
)
def test_they_are_those_of_hugging_face(name: str) -> None:
    checkpoint = load_checkpoint(DIRECTORY / name, dtype=jnp.float32)
    serving = ServingConfig(max_batch_size=4, n_slots=4 * 64, max_batch_tokens=64, scheduling=ORCA)
    engine = harness(checkpoint.config, checkpoint.parameters, serving, buckets=(64,))
    golden = load_routing(name)
    requests = [asking(str(i), one.prompt, 1) for i, one in enumerate(golden)]
    engine.run(requests)
    for request, (_, chosen, gaps) in zip(requests, golden, strict=True):
        ids = request.routed_experts
        assert ids is not None and ids.shape == chosen.shape
        sure = np.minimum.accumulate((gaps > MARGIN).all(axis=1))  # what follows a doubtful choice is too
        assert sure.mean() > 0.5
        np.testing.assert_array_equal(np.sort(ids)[sure], np.sort(chosen)[sure])


def test_experts_of_many_are_two_bytes_wide() -> None:
    model = mixture_model(hidden=32, size=16, top_k=1, number=300, n_layers=1)
    p = init_parameters(model, jax.random.key(1), jnp.float32)
    p = {name: value * (10 if "router" in name else 1) for name, value in p.items()}
    request = asking("many", np.arange(30), 4)
    harness(model, p, SERVING, buckets=(64,)).run([request])
    ids = request.routed_experts

    @jax.jit
    def chosen(tokens: jax.Array) -> jax.Array:
        routed = list[jax.Array]()
        reference.forward(model, p, tokens, routed=routed)
        return routed[0]

    expected = chosen(jnp.array([*request.prompt_ids, *request.output_ids][:-1]))
    assert ids is not None and ids.dtype == np.uint16 and ids.max() > 255
    np.testing.assert_array_equal(ids[:, 0], np.asarray(expected))


def test_tokens_that_are_known_are_not_added_again() -> None:
    def part(*experts: int) -> ExpertIds:
        return np.array(experts, np.uint8).reshape(-1, 1, 1)

    tokens = RoutedTokens()
    assert tokens.until(3) is None
    tokens.add(0, part(1, 2))
    tokens.add(2, part(3))
    tokens.add(0, part(7, 7, 7, 4))  # computed again from the start
    tokens.add(1, part(8, 8))
    tokens.add(4, part(5))
    assert tokens.n_tokens == 5
    whole, some = tokens.until(9), tokens.until(4)
    assert whole is not None and some is not None
    assert (whole.ravel().tolist(), some.ravel().tolist()) == ([1, 2, 3, 4, 5], [1, 2, 3, 4])
    with pytest.raises(AssertionError):
        tokens.add(6, part(1))
