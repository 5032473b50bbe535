"""Choosing tokens in C and in JAX: the same tokens and log-probabilities for any rows."""

import threading
from typing import Any

import jax
import numpy as np
import pytest

from orca_jax.execution.sampling import DeviceTokens, TokenChooser
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.flat_batch import Sampler, SamplerArrays, TokenPrograms
from orca_jax.iteration.message import SAMPLED
from orca_jax.request.sampled import as_records
from orca_jax.sharding.device_group import DeviceGroup
from tests.device.native.native_form import needs_native

VOCAB, N_ROWS = 700, 12


def rows_of(rng: np.random.Generator, sampler: Sampler) -> np.ndarray:
    """The buffer's rows [n, R]: greedy ones, some with top-k or top-p, two forced tokens, one padding row."""

    def bits(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).view(np.int32)

    n, some = N_ROWS, rng.random(N_ROWS) < 0.5
    known = np.full(n, SAMPLED)
    known[[3, 4]] = 17, 699
    where = np.arange(n)
    where[[3, 4, 11]] = n  # none is stored
    hot, cuts = sampler != "greedy", sampler == "full"
    rows = SamplerArrays(
        row=where,
        known=known,
        top_k=np.where(some & cuts, 20, 0),
        token_index=rng.integers(0, 100, n),
        seed_low=rng.integers(-(2**31), 2**31, n),
        seed_high=rng.integers(-(2**31), 2**31, n),
        adjusted=np.where(some, 2, 0),
        n_top=rng.permutation(np.array([-1, -1, 0, 0, 0, 1, 3, 5, 20, 20, 20, 2])),
        temperature=bits(rng.choice([0.0, 0.7, 1.0, 1.0], n) * hot),
        top_p=bits(np.where(~some & (where % 2 == 0) & cuts, 0.8, 1.0)),
        min_p=bits(rng.choice([0.0, 0.0, 0.1], n) * hot),
        repetition=bits(np.full(n, 1.3)),
        frequency=bits(np.full(n, 0.4)),
        presence=bits(np.full(n, 0.2)),
    )
    return np.stack(rows).astype(np.int32)


@needs_native
@pytest.mark.parametrize("sampler", ["greedy", "plain", "full"])
@pytest.mark.parametrize("changes", [False, True])
def test_both_forms_choose_the_same_tokens_and_log_probabilities(sampler: Sampler, changes: bool) -> None:
    place = DeviceGroup((jax.devices()[0],)).place()
    choosers = [TokenChooser(VOCAB, N_ROWS, place, native=native) for native in (True, False)]
    assert [chooser._native for chooser in choosers] == [True, False]
    programs = TokenPrograms(sampler, adjust=changes, allow=changes, logprobs=True)
    rng = np.random.default_rng(1)
    for _ in range(6):
        logits = jax.device_put(rng.normal(0, 3, (N_ROWS, VOCAB)).astype(np.float32), place)
        rows = rows_of(rng, sampler)
        words = rng.integers(-(2**31), 2**31, (N_ROWS, n_words(VOCAB))).astype(np.int32) if changes else None
        batch, results = SamplerArrays(*rows), []
        for chooser in choosers:
            chosen = chooser.choose(logits, jax.device_put(rows, place), programs, words)
            tokens, found = chosen.tokens, chosen.logprobs
            assert found is not None
            results.append(
                (np.asarray(tokens), as_records(np.asarray(found)), np.asarray(chooser.last_token))
            )
        (ours, found, last), (theirs, expected, their_last) = results
        sampled, wanted = batch.known == SAMPLED, batch.n_top >= 0
        assert ours[sampled].tolist() == theirs[sampled].tolist()
        assert last.tolist() == their_last.tolist()
        assert found["token_id"].tolist() == expected["token_id"].tolist()
        assert found["token_id"][[3, 4]].tolist() == [17, 699]
        np.testing.assert_allclose(
            found["logprob"][wanted], expected["logprob"][wanted], rtol=2e-6, atol=2e-6
        )
        for row, n_top in enumerate(batch.n_top):
            top = slice(0, max(n_top, 0))
            assert found["top_ids"][row, top].tolist() == expected["top_ids"][row, top].tolist()
            np.testing.assert_allclose(
                found["top_logprobs"][row, top], expected["top_logprobs"][row, top], rtol=2e-6, atol=2e-6
            )
        whole = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        expected_of_raw = whole[np.arange(N_ROWS), found["token_id"]]
        np.testing.assert_allclose(found["logprob"][wanted], expected_of_raw[wanted], rtol=1e-5, atol=1e-5)


def test_without_native_the_log_probabilities_are_a_separate_program() -> None:
    place = DeviceGroup((jax.devices()[0],)).place()
    for native in (True, False):
        chooser = TokenChooser(VOCAB, N_ROWS, place, native=native)
        names = [program.name for program in chooser.programs([1, 4])]
        assert ("log-probabilities, 4 rows" in names) is not chooser._native


class HeldArray:
    """An array that is ready once `released` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.released, self.error = threading.Event(), error

    def copy_to_host_async(self) -> None: ...

    def is_ready(self) -> bool:
        return self.released.is_set()

    def block_until_ready(self) -> None:
        assert self.released.wait(10)
        if self.error is not None:
            raise self.error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.block_until_ready()
        return np.array([5], np.int32)


def test_a_wait_ends_after_its_time_or_once_the_tokens_are_there() -> None:
    array: Any = HeldArray()
    tokens, before = DeviceTokens(array), threading.enumerate()
    tokens.wait(0)
    tokens.wait(1e-3)
    assert not tokens.is_ready()
    (thread,) = (
        thread for thread in threading.enumerate() if thread.name == "orca-wait" and thread not in before
    )
    array.released.set()
    tokens.wait(10)
    thread.join(10)
    assert not thread.is_alive()
    assert tokens.is_ready() and tokens.fetch().token_ids.tolist() == [5]


def test_a_wait_ends_if_the_device_fails_and_fetch_says_so() -> None:
    array: Any = HeldArray(RuntimeError("the device failed"))
    tokens = DeviceTokens(array)
    array.released.set()
    tokens.wait(10)
    with pytest.raises(RuntimeError, match="the device failed"):
        tokens.fetch()
