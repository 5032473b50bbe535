"""A draft model's engine beside a service: what a round costs, and what happens when it fails."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.engine.draft_engine import DraftEngine
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import serving_buckets
from orca_jax.planning.sizes import engine_shape, kv_manager
from orca_jax.request.request import Request, RequestState, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.speculation.drafter import configured_speculation
from tests.gpt_config import changed_config
from tests.host.engines import CONFIG, MODEL, SOON, orca, simulated, writing
from tests.log_records import messages_of

SCHEDULING = SchedulingConfig(speculative="draft:it")
SIZES = ServingConfig(
    max_batch_size=4,
    n_slots=256,
    max_batch_tokens=32,
    block_size=8,
    coarse_buckets=True,
    scheduling=SchedulingConfig(),
)
BUCKETS = serving_buckets(SIZES)  # 1, 8, 16, 32


class Spelling:
    """An engine whose tokens spell "ab...", until it has `n_good` iterations behind it."""

    n_workers, keeps_tokens = 1, True

    def __init__(self, n_good: int) -> None:
        self.n_good = n_good
        self.batches: list[list[int]] = []  # the tokens of each row of each iteration

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self.n_good -= 1
        if self.n_good < 0:
            raise RuntimeError("out of memory")
        self.batches.append([n for _, n in rows])
        return Iteration(rows, [ord("ab"[(req.n_computed + n) % 2]) for req, n in rows])

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned:
        return Returned(iteration.pending)


def draft_engine(engine: Spelling, each: float = 0.0) -> DraftEngine:
    """One whose iteration of n tokens costs `each` times n."""
    kv = kv_manager(engine_shape(MODEL, SIZES, n_workers=1), SIZES.scheduling)
    return DraftEngine(engine, kv, model=MODEL, config=SIZES, costs=[each * size for size in BUCKETS])


def test_a_draft_model_that_fails_leaves_its_requests_without_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Spelling(n_good=9)
    shared = draft_engine(model)
    config = replace(CONFIG, scheduling=SCHEDULING)
    with orca(simulated(writing("ab")), config=config, drafter=shared) as service:
        token_ids = service.submit([1, 2], SamplingParams(max_tokens=31)).result(SOON).token_ids
        again = service.submit([1, 2], SamplingParams(max_tokens=31)).result(SOON).token_ids
    whole = [ord("ab"[i % 2]) for i in range(31)]
    assert token_ids == again == whole
    assert shared.failed and service.speculation is not None
    # Three places of the batch are left for drafts. The first round computes the prompt and the first token,
    # and each later one the last draft and the token after it.
    assert model.batches == [[3], [1], [1], [2], [1], [1], [2], [1], [1]]
    assert service.speculation.n_accepted == service.speculation.n_drafted == 9
    assert messages_of(caplog, "orca_jax.engine") == [
        "the draft model failed; all requests go on without drafts"
    ]


def request(n_prompt: int, n_output: int, most_output: int, shared: DraftEngine) -> Request:
    made = configured_speculation(SCHEDULING, vocab_size=MODEL.vocab_size, draft_model=shared)
    assert made is not None
    req = Request("a", (1,) * n_prompt, n_prompt + most_output, SamplingParams(), seed=0, kind=Drafted(made))
    req.output_ids += [2] * n_output
    req.state, req.row = RequestState.INCREMENT, 0
    return req


def test_what_a_round_costs() -> None:
    shared = draft_engine(Spelling(100), each=1.0)
    near = request(3, 2, 20, shared)
    # Five tokens to compute, in the bucket of 8; then two decodes of one token.
    assert shared.cost([(near, 3)]) == 8 + 1 + 1
    other = request(1, 2, 20, shared)
    assert shared.cost([(near, 3), (other, 1)]) == 8 + 1 + 1
    shared.draft([(near, 3)])
    near.output_ids.append(4)
    assert shared.cost([(near, 1)]) == 1
    # Of 40 tokens 32 are computed once for an expected output of 20, of which this round brings four.
    far = request(38, 2, 42, shared)
    assert shared.cost([(far, 3)]) == 8 + 1 + 1 + 32 * 4 / 20
    assert shared.cost([(far, 1)]) == 8 + 32 * 2 / 20


def test_requests_that_the_model_cannot_compute_get_no_drafts() -> None:
    shared = draft_engine(Spelling(100))
    (drafts,) = shared.draft([(request(60, 3, 5, shared), 3)])
    assert drafts is not None and len(drafts) == 0, "its prompt takes another round"
    (drafts,) = shared.draft([(request(60, 5, 9, shared), 3)])
    assert drafts is None, "longer than the positions"
    small = changed_config(MODEL, vocab_size=2, eos_token_ids=(1,))
    kv = kv_manager(engine_shape(small, SIZES, n_workers=1), SIZES.scheduling)
    fewer = DraftEngine(Spelling(100), kv, model=small, config=SIZES, costs=[0.0] * len(BUCKETS))
    assert fewer.draft([(request(3, 1, 9, fewer), 1)]) == [None]
