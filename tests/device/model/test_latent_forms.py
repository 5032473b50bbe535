"""The form of latent attention that each row takes, in engines whose tokens are the reference's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.execution import attention_paths
from orca_jax.execution.attention_paths import LatentByRow, Native, PureJax
from orca_jax.execution.worker import Worker
from orca_jax.families import attention_config
from orca_jax.families.attention_config import Latent
from orca_jax.model import attention as pure_jax
from orca_jax.model.reference import forward
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import Harness, greedy_request, harness, single_worker
from tests.device.model.any_model import any_model
from tests.device.model.drawn_weights import drawn
from tests.device.model.latent_models import SIGMOID, dense, latent_model
from tests.device.native.native_form import needs_native

# Behind 16 tokens a row takes the plain form from 16 new ones on.
LATENT = Latent(rank=48, rotary_size=16, plain_size=16, value_size=16, query_rank=10)
MODEL = latent_model(LATENT, 3, [dense(), dense(8, SIGMOID)])
SERVING = ServingConfig(max_batch_size=4, n_slots=72, max_batch_tokens=48, block_size=8)
ATTENTIONS = ["follow_lengths", pytest.param("native", marks=needs_native)]


class Taken(NamedTuple):
    """The rows of each form in one layer of one iteration."""

    form: str
    rows: list[tuple[int, int]]  # new tokens, and all; those that it has keys for


TAKEN: list[Taken] = []


def note(form: str, row_start: Any, kv_length: Any) -> None:
    rows = zip(np.diff(row_start).tolist(), np.asarray(kv_length).tolist(), strict=True)
    TAKEN.append(Taken(form, [row for row in rows if row[1] > 0]))


def spied(function: Any, form: str, first: int) -> Any:
    """Wrap `function` to record its row_start, argument number `first`, and its kv_length, the next one."""

    def call(*arrays: Any, **options: Any) -> Any:
        jax.debug.callback(partial(note, form), arrays[first], arrays[first + 1])
        return function(*arrays, **options)

    return call


@pytest.fixture(scope="module", autouse=True)
def watched() -> Iterator[None]:
    """Let rows of two tokens take the plain form, because prompts are short, and record the forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_config, "FEWEST_PLAIN", 2)
        for module, name, form, first in (
            (attention_paths, "plain_attention", "plain", 4),
            (attention_paths, "native_plain_latent", "plain", 4),
            (attention_paths, "native_split_attention", "absorbed", 4),
            (pure_jax, "split_attention", "absorbed", 3),
        ):
            patch.setattr(module, name, spied(getattr(module, name), form, first))
        yield


@cache
def parameters() -> dict[str, jax.Array]:
    return drawn(MODEL, 4)


@cache
def reference() -> GreedyReference:
    return GreedyReference(MODEL, parameters())


@cache
def worker(attention: Attention) -> Worker:
    """A worker for all cases, so that its programs compile once."""
    return single_worker(MODEL, parameters(), SERVING, n_rows=8, attention=attention)


def engine(attention: Attention, prefill_tokens: int) -> Harness:
    scheduling = SchedulingConfig(prefill_tokens=prefill_tokens)
    serving = replace(SERVING, scheduling=scheduling)
    TAKEN.clear()
    return harness(MODEL, parameters(), serving, buckets=(4, 48), workers=[worker(attention)])


def taken() -> dict[str, set[tuple[int, int]]]:
    """The rows of each form, checked to have taken the one with less work."""
    jax.effects_barrier()
    rows: dict[str, set[tuple[int, int]]] = {"plain": set(), "absorbed": set()}
    for each in TAKEN:
        rows[each.form] |= set(each.rows)
    assert all(LATENT.is_plain(*row) for row in rows["plain"])
    # The program for 4 tokens, which decode may fill, has the absorbed form alone.
    assert not any(LATENT.is_plain(*row) for row in rows["absorbed"] if row[0] > 4)
    return rows


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_pieces_prefixes_and_decode_in_one_iteration(attention: Attention) -> None:
    rng = np.random.default_rng(1)
    begin = rng.integers(0, 53, 21).tolist()
    prompts = [[*begin, *rng.integers(0, 53, n).tolist()] for n in (1, 12, 5, 9, 3)] + [begin[:16], begin]
    asked = [greedy_request(str(i), prompt, 5) for i, prompt in enumerate(prompts)]
    run = engine(attention, 30)
    run.run(asked, arrivals=[0, 2, 3, 4, 4, 9, 20])
    assert any(request.n_cached > 0 for request in asked)
    rows = taken()
    assert any(n < length for n, length in rows["plain"])  # a piece, or behind a prefix
    assert any(n > 1 for n, _ in rows["absorbed"])
    both = [
        {before.form, after.form} == {"plain", "absorbed"} and before.rows and after.rows
        for before, after in pairwise(TAKEN)
    ]
    assert any(both)
    assert sum(reference().sure(request) for request in asked) > 0.8 * 5 * len(asked)


@pytest.mark.parametrize("attention", ATTENTIONS)
@settings(any_model, max_examples=4)
@given(
    prefill_tokens=st.sampled_from([3, 8, 17, 30, 48]),
    lengths=st.lists(st.tuples(st.sampled_from([0, 8, 16, 21]), st.integers(1, 14)), min_size=2, max_size=6),
    arrivals=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_schedule_keeps_the_tokens(
    attention: Attention,
    prefill_tokens: int,
    lengths: list[tuple[int, int]],
    arrivals: list[int],
    seed: int,
) -> None:
    """Prompts with a shared prefix, in chunks, batched with decode, maybe preempted."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 53, 21).tolist()
    prompts = [[*begin[:n], *rng.integers(0, 53, own).tolist()] for n, own in lengths]
    asked = [greedy_request(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    engine(attention, prefill_tokens).run(asked, arrivals=arrivals[: len(asked)])
    taken()
    assert sum(reference().sure(request) for request in asked) > 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prompts_are_scored_in_the_plain_form(attention: Attention) -> None:
    rng = np.random.default_rng(3)
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1)
    prompts = [tuple(rng.integers(0, 53, n).tolist()) for n in (30, 9)]
    asked = [Request(str(i), prompt, len(prompt) + 1, sampling, seed=0) for i, prompt in enumerate(prompts)]
    engine(attention, 48).run(asked)
    assert (29, 29) in taken()["plain"]  # those that are scored, of a prompt of 30
    logits = jax.jit(partial(forward, MODEL))
    for request in asked:
        n, prompt = len(request.prompt_ids), np.resize(request.prompt_ids, 30)  # the rest changes nothing
        exact = np.asarray(jax.nn.log_softmax(logits(parameters(), jnp.asarray(prompt))))
        exact = exact[range(n - 1), request.prompt_ids[1:]]
        assert request.prompt_logprobs is not None
        np.testing.assert_allclose([one.logprob for one in request.prompt_logprobs], exact, atol=3e-4)


@needs_native
@pytest.mark.long
def test_heads_over_devices_in_c() -> None:
    model = replace(latent_model(LATENT, 4, [dense()] * 4), vocab_size=64).for_devices(2)
    weights = drawn(model, 5)
    parts = split_model(model, jax.devices(), ParallelConfig(pipeline_parallel=2, tensor_parallel=2))
    asked = [greedy_request(str(i), list(range(i, i + n)), 4) for i, n in enumerate((30, 3, 17, 1))]
    TAKEN.clear()
    serving = replace(SERVING, scheduling=SchedulingConfig(prefill_tokens=20))
    harness(model, weights, serving, buckets=(4, 48), parts=parts).run(asked, arrivals=[0, 1, 2, 2])
    assert taken()["plain"]
    truth = GreedyReference(model, weights)
    assert sum(truth.sure(request) for request in asked) > 0.5 * 4 * len(asked)


@pytest.mark.matrix
def test_tokens_in_the_absorbed_form_may_come_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 9 tokens, after a shared prefix of 21, is cut into slabs of R tokens."""
    monkeypatch.setattr(attention_paths, "SLAB", 1)
    serving = replace(SERVING, scheduling=SchedulingConfig())
    own = single_worker(MODEL, parameters(), serving, n_rows=8, attention="follow_lengths")
    rng = np.random.default_rng(2)
    begin = rng.integers(0, 53, 21).tolist()
    asked = [
        greedy_request(str(i), [*begin, *rng.integers(0, 53, n).tolist()], 4) for i, n in enumerate([1, 9, 7])
    ]
    TAKEN.clear()
    harness(MODEL, parameters(), serving, buckets=(4, 48), workers=[own]).run(asked, arrivals=[0, 2, 2])
    jax.effects_barrier()
    lengths = {n for each in TAKEN if each.form == "absorbed" for n, _ in each.rows}
    assert max(lengths) <= 4 and max(lengths) > 1
    assert any(each.form == "plain" and each.rows for each in TAKEN)
    assert sum(reference().sure(request) for request in asked) > 0.8 * 4 * len(asked)


def test_programs_of_decode_alone_have_one_form() -> None:
    """So do deterministic engines, and models whose compressed vectors are as small as a key and a value."""
    chosen = worker("follow_lengths").attention.path
    assert chosen == LatentByRow(PureJax(follow_lengths=True), LATENT, in_c=False)
    deterministic = replace(SERVING, deterministic=True)
    alone = single_worker(MODEL, parameters(), deterministic, n_rows=8, attention="follow_lengths")
    assert alone.attention.path == PureJax(follow_lengths=True)
    small = Latent(rank=16, rotary_size=16, plain_size=16, value_size=16)
    assert not small.is_plain(48, 48)


@needs_native
def test_sizes_without_a_native_form_are_plain_in_pure_jax() -> None:
    latent = Latent(rank=32, rotary_size=16, plain_size=6, value_size=5)
    odd = latent_model(latent, 3, [dense()] * 2)
    weights = drawn(odd, 3)
    own = single_worker(odd, weights, SERVING, n_rows=8)
    assert own.attention.path == LatentByRow(Native(), latent, in_c=False)
    TAKEN.clear()
    asked = [greedy_request(str(i), list(range(i, i + 20)), 4) for i in range(3)]
    harness(odd, weights, SERVING, buckets=(4, 48), workers=[own]).run(asked)
    jax.effects_barrier()
    assert any(each.form == "plain" and each.rows for each in TAKEN)
    truth = GreedyReference(odd, weights)
    assert sum(truth.sure(request) for request in asked) > 0
