"""Random requests for one small engine of one or more stages, shared by several tests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from orca_jax.config import ORCA, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.grammar.constraint import BadWords, ConstraintRules
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import PLAIN, Request, RowKind
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import Harness, harness
from tests.gpt_config import gpt_config
from tests.random_pieces import RandomPieces

MODEL = gpt_config(
    vocab_size=67, n_positions=48, hidden_size=16, n_layers=2, n_heads=2, ffn_size=24, vocab_multiple=2
)
BLOCK_SIZE = 4
SERVING = ServingConfig(max_batch_size=3, n_slots=84, max_batch_tokens=64, block_size=BLOCK_SIZE)
# The newest tokens stay on the device and iterations overlap, or do not; or they go by way of the host.
Mode = Literal["overlap", "no overlap", "through the host"]
MODES: tuple[Mode, ...] = ("overlap", "no overlap", "through the host")


@dataclass(frozen=True)
class PlannedRequest:
    """A request that arrives before a step."""

    arrival: int
    prompt: tuple[int, ...]
    n_output: int
    sampling: SamplingParams
    banned: tuple[int, ...] = ()
    priority: int = 0
    owner: str = ""


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that tokens vary and choices are sure."""
    p = init_parameters(MODEL, jax.random.key(5), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def stages(n_stages: int) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    engine = harness(MODEL, parameters(), SERVING, buckets=(8, 64), parts=parts).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return parts, engine._workers.workers


def built(n_stages: int, mode: Mode, scheduling: SchedulingConfig = ORCA) -> Harness:
    parts, workers = stages(n_stages)
    serving = replace(SERVING, overlap=mode == "overlap", scheduling=scheduling)
    ran = harness(MODEL, {}, serving, buckets=(8, 64), parts=parts, workers=workers)
    if mode == "through the host":
        assert isinstance(ran.scheduler.engine, EngineMaster)
        ran.scheduler.engine.keeps_tokens = False
    return ran


def request(name: str, planned: PlannedRequest, kind: RowKind = PLAIN) -> Request:
    """The request; a beam search and a scored output have no constraint."""
    rules = ConstraintRules(vocab_size=MODEL.vocab_size, bad_words=BadWords((i,) for i in planned.banned))
    return Request(
        name,
        planned.prompt,
        len(planned.prompt) + planned.n_output,
        planned.sampling,
        seed=int(name),
        end_token_ids=frozenset({5}),
        kind=kind,
        constraint=rules.begin() if kind is PLAIN or isinstance(kind, Drafted) else None,
        priority=planned.priority,
        owner=planned.owner,
    )


def play(
    all_planned: Sequence[PlannedRequest],
    n_stages: int,
    mode: Mode,
    *,
    pieces: random.Random | None = None,
    lost_before: int = -1,
    scheduling: SchedulingConfig = ORCA,
    kinds: Mapping[int, RowKind] = MappingProxyType({}),
) -> tuple[list[Request], Scheduler]:
    """Play the requests; return them with their scheduler. Before step `lost_before` all caches are lost."""
    ran = built(n_stages, mode, scheduling)
    requests = [request(str(i), planned, kinds.get(i, PLAIN)) for i, planned in enumerate(all_planned)]
    if pieces is not None:
        ran.scheduler.policy = RandomPieces(ran.scheduler.policy, pieces)

    def before_step(step: int) -> None:
        if step == lost_before:
            for worker in stages(n_stages)[1]:
                worker.renew()
            # What waited for a token before it will not come back either.
            assert isinstance(ran.scheduler.engine, EngineMaster)
            assert isinstance(ran.scheduler.engine._workers, LocalWorkers)
            ran.scheduler.engine._workers._to_do.clear()
            run_again(ran.scheduler)

    ran.run(requests, [planned.arrival for planned in all_planned], before_step)
    return requests, ran.scheduler


def drawn_policies(*, deterministic: bool) -> st.SearchStrategy[SchedulingConfig]:
    """The ways to schedule, of which a deterministic engine has fewer."""
    orders = ["fcfs", "priority", "fair"]
    if deterministic:
        return st.builds(
            SchedulingConfig,
            chunked_prefill=st.just(False),
            prefix_caching=st.just(False),
            reservation=st.just("full"),
            scheduling_policy=st.sampled_from(orders),
        )
    return st.booleans().flatmap(
        lambda prefix_caching: st.builds(
            SchedulingConfig,
            chunked_prefill=st.booleans(),
            prefix_caching=st.just(prefix_caching),
            reservation=st.sampled_from(["full", "on-demand"]),
            scheduling_policy=st.sampled_from([*orders, *["longest-prefix"] * prefix_caching]),
        )
    )


def assert_same(result: Request, unsplit: Request) -> None:
    assert (result.output_ids, result.finish_reason) == (unsplit.output_ids, unsplit.finish_reason)
    assert (result.prompt_logprobs is None) == (unsplit.prompt_logprobs is None)
    for ours, theirs in (
        (result.logprobs, unsplit.logprobs),
        (result.prompt_logprobs, unsplit.prompt_logprobs),
    ):
        assert_same_logprobs(ours or [], theirs or [])


def assert_same_logprobs(
    result: Sequence[TokenLogprobs], unsplit: Sequence[TokenLogprobs], *, atol: float = 1e-3
) -> None:
    assert [token.token_id for token in result] == [token.token_id for token in unsplit]
    np.testing.assert_allclose(
        [token.logprob for token in result], [token.logprob for token in unsplit], atol=atol, rtol=0
    )
    for ours, theirs in zip(result, unsplit, strict=True):
        np.testing.assert_allclose([v for _, v in ours.top], [v for _, v in theirs.top], atol=atol, rtol=0)


tokens = st.integers(0, MODEL.vocab_size - 1)
# Prompts may begin alike, and be equal.
STEMS = [(), tuple(range(17)), (*range(8), *range(20, 26))]
tails = st.lists(tokens, min_size=1, max_size=13) | st.just([1])
planned_requests = st.lists(
    st.builds(
        PlannedRequest,
        arrival=st.integers(0, 8),
        prompt=st.builds(lambda stem, tail: (*stem, *tail), st.sampled_from(STEMS), tails),
        n_output=st.integers(1, 10),
        sampling=st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.0, 1.0]),
            top_p=st.sampled_from([1.0, 0.7]),
            repetition_penalty=st.sampled_from([1.0, 1.7]),
            frequency_penalty=st.sampled_from([0.0, 1.5]),
            logit_bias=st.dictionaries(tokens, st.sampled_from([-5.0, 5.0]), max_size=2),
            logprobs=st.none() | st.integers(0, 3),
            prompt_logprobs=st.none() | st.integers(0, 3),
        ),
        banned=st.lists(tokens, max_size=2, unique=True).map(tuple),
        priority=st.integers(-1, 1),
        owner=st.sampled_from(["", "A", "B"]),
    ),
    min_size=1,
    max_size=6,
)
