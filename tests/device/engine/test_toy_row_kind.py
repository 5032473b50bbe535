"""A new kind of row in one file: drafted rows, through policy, scheduler, engine master and worker.

The engine knows nothing of them. A drafted row has its request's newest token and some guesses of what
follows. A token is sampled after each of these, and the guesses that were right are kept. The draw depends
only on seed and index, so the tokens are those of a plain request with the same seed.
"""

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import PLAIN, FinishReason, InputRow, Request, RowAnswer, RowKind
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import split_model
from tests.device.harness import Harness, harness
from tests.gpt_config import gpt_config

MODEL = gpt_config(vocab_size=97, n_positions=96, hidden_size=32, n_layers=2, n_heads=2, ffn_size=64)
N_OUTPUT = 40


class Drafted(RowKind):
    """Up to `n_drafts` guesses an iteration, from `right` with every `wrong_each`th token wrong."""

    def __init__(self, right: Sequence[int], n_drafts: int, wrong_each: int) -> None:
        self._guesses = [
            (token_id + (i % wrong_each == 0)) % MODEL.vocab_size for i, token_id in enumerate(right)
        ]
        self.n_drafts = n_drafts
        self._drafts: Sequence[int] = ()  # of the iteration in flight
        self.n_kept = 0

    def runs_ahead(self, req: Request) -> bool:
        return False

    @classmethod
    def most_tokens(cls, requests: Sequence[Request]) -> list[int]:
        drafted = ((req, req.kind) for req in requests)
        return [
            min(1 + kind.n_drafts, req.most_output - len(req.output_ids))
            for req, kind in drafted
            if isinstance(kind, Drafted)
        ]

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        if req.in_initiation:
            self._drafts = ()
            return super().rows(req, n_tokens, places)
        n = len(req.output_ids)
        self._drafts = self._guesses[n : n + n_tokens - 1]
        known = [req.output_ids[-1], *self._drafts]
        return [InputRow(req.row, req.n_computed + i, (token_id,)) for i, token_id in enumerate(known)]

    def accept(self, req: Request, answer: RowAnswer) -> tuple[Sequence[int], FinishReason | None]:
        n_right, (sampled, logprobs) = 0, answer
        while n_right < len(self._drafts) and self._drafts[n_right] == sampled[n_right]:
            n_right += 1
        req.n_computed -= len(self._drafts) - n_right
        self.n_kept += n_right
        token_ids, reason = req.accept_all(sampled[: n_right + 1])
        req.logprobs += logprobs[: len(token_ids)]
        return token_ids, reason


@cache
def parameters() -> dict[str, jax.Array]:
    p = init_parameters(MODEL, jax.random.key(5), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def engine(n_stages: int = 1, *, n_slots: int = 512, deterministic: bool = False) -> Harness:
    serving = ServingConfig(
        max_batch_size=8,
        n_slots=n_slots,
        max_batch_tokens=32 if not deterministic else 128,
        block_size=4,
        deterministic=deterministic,
        scheduling=SchedulingConfig(chunked_prefill=False, prefix_caching=False, reservation="full")
        if deterministic
        else SchedulingConfig(prefill_tokens=8),
    )
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    buckets = None if deterministic else (8, 32)
    return harness(MODEL, parameters(), serving, parts=parts, buckets=buckets, attention="follow_lengths")


def asked(i: int, kind: RowKind = PLAIN) -> Request:
    """Prompts of different lengths, greedy or sampled; each request has a seed of its own."""
    prompt = np.random.default_rng(i).integers(0, MODEL.vocab_size, 3 + 5 * i).tolist()
    sampling = SamplingParams(
        max_tokens=N_OUTPUT, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=0 if i == 1 else None
    )
    return Request(f"{i}", tuple(prompt), len(prompt) + N_OUTPUT, sampling, seed=i, kind=kind)


@cache
def plain(i: int) -> Request:
    """The request with plain rows, alone."""
    request = asked(i)
    engine().run([request])
    return request


def drafted(i: int, *, n_drafts: int = 3, wrong_each: int = 5) -> tuple[Request, Drafted]:
    kind = Drafted(plain(i).output_ids, n_drafts, wrong_each)
    return asked(i, kind), kind


@pytest.mark.parametrize("n_stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_drafted_request_gets_a_plain_one_s_tokens_in_fewer_iterations(n_stages: int) -> None:
    for i in (0, 1):
        request, kind = drafted(i)
        engine(n_stages).run([request])
        assert request.output_ids == plain(i).output_ids
        assert request.finish_reason is FinishReason.LENGTH
        # Every fifth guess is wrong: an iteration keeps three guesses, the next the two before the wrong one.
        assert kind.n_kept > N_OUTPUT / 2
        assert request.n_iterations <= N_OUTPUT - kind.n_kept + 3
    records = [record.logprob for record in request.logprobs]
    np.testing.assert_allclose(records, [record.logprob for record in plain(1).logprobs], atol=1e-4)


def test_guesses_that_are_all_wrong_or_all_right_change_no_token() -> None:
    for wrong_each, most_kept in ((1, 0), (1000, N_OUTPUT)):
        request, kind = drafted(1, wrong_each=wrong_each)
        engine().run([request])
        assert request.output_ids == plain(1).output_ids
        assert kind.n_kept <= most_kept and (kind.n_kept > N_OUTPUT // 2) == (most_kept > 0)


def test_beside_plain_requests_they_take_the_places_that_are_left() -> None:
    """All tokens stay the same in mixed batches, with few blocks and rows, and with shared prefixes."""
    for n_slots in (512, 128):
        pairs = [drafted(i) for i in range(4)]
        others = [asked(i) for i in range(4, 7)]
        engine(n_slots=n_slots).run([*(request for request, _ in pairs), *others], [0, 0, 1, 9, 0, 2, 4])
        for i, (request, _) in enumerate(pairs):
            assert request.output_ids == plain(i).output_ids, i
        for i, request in enumerate(others):
            assert request.output_ids == plain(4 + i).output_ids, i
        assert sum(kind.n_kept for _, kind in pairs) > 0


def test_after_a_loss_they_resume() -> None:
    house = engine()
    request, _ = drafted(1)
    house.pool.add(request)
    while len(request.output_ids) < 9:
        house.scheduler.step()
    run_again(house.scheduler)
    house.run([])
    assert request.output_ids == plain(1).output_ids


@pytest.mark.matrix
def test_a_deterministic_engine_computes_them_too() -> None:
    house = engine(deterministic=True)
    alone = [asked(i) for i in range(6)]
    for request in alone:
        house.run([request])
    kinds = [Drafted(request.output_ids, 5, 5) for request in alone]
    requests = [asked(i, kind) for i, kind in enumerate(kinds)]
    house.run(requests)  # all at once: six newest tokens and two guesses fill a batch
    for request, one, kind in zip(requests, alone, kinds, strict=True):
        assert request.output_ids == one.output_ids and kind.n_kept > 0
        assert [record.logprob for record in request.logprobs] == [record.logprob for record in one.logprobs]
