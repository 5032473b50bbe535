"""The worker: its programs compile once, donate their caches, and leave other slots alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import Attention, ServingConfig
from orca_jax.execution.sampling import DeviceTokens, TokenChooser
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.grammar.token_mask import words_of
from orca_jax.iteration.flat_batch import FlatBatch, batch_sizes, flat_batch
from orca_jax.iteration.message import BIAS, CONSTRAINED, SAMPLED, ControlMessage, neutral_sampling
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.transformer import init_parameters
from orca_jax.planning.sizes import engine_shape
from tests.device.harness import greedy_request, harness, single_worker
from tests.gpt_config import gpt_config

MODEL = gpt_config(vocab_size=67, n_positions=32, hidden_size=16, n_layers=2, n_heads=2, ffn_size=24)
SERVING = ServingConfig(max_batch_size=4, n_slots=64, max_batch_tokens=32, block_size=4)
N_ROWS = 2 * SERVING.max_batch_size
UNTOUCHED = 7.0


def worker(attention: Attention | None = None) -> Worker:
    parameters = init_parameters(MODEL, jax.random.key(0), jnp.float32)
    return single_worker(MODEL, parameters, SERVING, n_rows=N_ROWS, attention=attention)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one with each program that XLA compiles."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def chooser(device: Worker) -> TokenChooser:
    assert device.chooser is not None
    return device.chooser


def issue(device: Worker, message: ControlMessage, flat: FlatBatch) -> DeviceTokens:
    """An iteration without constrained rows."""
    device.prepare(message)
    last = device.forward(flat, device.last_token)
    reads = device.read_prompts(last, message, [])
    return chooser(device).choose(last.logits, last.rows, flat.programs, None, reads)


def batch(
    row: list[int], blocks: list[list[int]], input_length: list[int], kv_length: list[int], *, bucket: int
) -> tuple[ControlMessage, FlatBatch]:
    """An iteration of these rows; those with one token take it from the device."""
    n, lengths = len(row), np.array(input_length, np.int32)
    table = np.zeros((n, MODEL.n_positions // SERVING.block_size), np.int32)
    for i, ids in enumerate(blocks):
        table[i, : len(ids)] = ids
    message = ControlMessage(
        row=np.array(row, np.int32),
        initiation=lengths > 1,
        token_index=np.zeros(n, np.int32),
        input_length=lengths,
        kv_length=np.array(kv_length, np.int32),
        n_prompt=np.zeros(n, np.int32),
        next_token=np.full(n, SAMPLED, np.int32),
        earlier_ids=np.array([], np.int32),
        token_ids=np.where(np.repeat(lengths, lengths) > 1, 5, 0).astype(np.int32),
        token_on_device=lengths == 1,
        block_table=table,
        sampling=neutral_sampling(n),
        bias=np.array([], BIAS),
    )
    flat = flat_batch(
        message,
        bucket=bucket,
        max_bs=SERVING.max_batch_size,
        block_size=SERVING.block_size,
        n_slots=SERVING.n_blocks * SERVING.block_size,
        n_rows=N_ROWS,
    )
    return message, flat


def test_each_program_compiles_once() -> None:
    device = worker()

    def run() -> None:
        """Run one prefill in the bucket of 32 tokens and one decode in that of 8."""
        harness(MODEL, {}, SERVING, buckets=(8, 32), workers=[device]).run([greedy_request("a", range(9), 2)])

    with compilations() as compiled:
        run()
    assert len(compiled) == 3, "two forward passes, and one choice: both buckets have four rows"
    with compilations() as compiled:
        run()
        run()
    assert not compiled


def test_caches_and_last_token_are_donated() -> None:
    device = worker()
    for input_length, kv_length in ((3, 3), (1, 4), (1, 5)):
        taken = [*jax.tree.leaves(device._caches), chooser(device).last_token]
        issue(device, *batch([2], [[6, 3]], [input_length], [kv_length], bucket=8)).fetch()
        assert all(array.is_deleted() for array in taken)
        given = [*jax.tree.leaves(device._caches), chooser(device).last_token]
        assert not any(array.is_deleted() for array in given)
        assert len(given) == 2 * MODEL.n_layers + 1


@pytest.mark.matrix(but=["4-follow_lengths", "4-static"])
@pytest.mark.parametrize("attention", ["follow_lengths", "static"])
@pytest.mark.parametrize("bucket", [4, 32])
def test_padding_writes_nothing(attention: Attention, bucket: int) -> None:
    """Two requests, one in each phase, fill 4 tokens; the rest of the bucket leaves no trace."""
    device = worker(attention)
    device._caches = jax.tree.map(lambda cache: cache + UNTOUCHED, device._caches)
    chooser(device).last_token -= 1  # which is no token
    issue(device, *batch([1, 6], [[0, 9], [4]], [3, 1], [3, 2], bucket=bucket)).fetch()
    written = [(0, 0), (0, 1), (0, 2), (4, 1)]  # block and place in it
    for layer in device._caches:
        assert isinstance(layer, LayerCache)
        for cache in layer.both:
            touched = np.asarray((cache != UNTOUCHED).any(axis=(1, 3)))  # [n_blocks, B]
            assert list(zip(*np.nonzero(touched), strict=True)) == written
    last_token = np.asarray(chooser(device).last_token)
    assert np.flatnonzero(last_token >= 0).tolist() == [1, 6]


def test_masks_are_computed_while_the_forward_pass_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host follows a grammar while the device computes; a missing mask delays later iterations."""
    device = worker()
    calls: list[str] = []
    forward = device.stage.forward

    def issued(*arrays: Any, **sizes: Any) -> Any:
        calls.append("forward")
        return forward(*arrays, **sizes)

    def words() -> np.ndarray | None:
        calls.append("words")
        return words_of([7], MODEL.vocab_size)[None] if is_known else None

    is_known = False
    monkeypatch.setattr(device.stage, "forward", issued)
    workers = LocalWorkers([device], batch_sizes(engine_shape(MODEL, SERVING, n_workers=1)))
    constrained, _ = batch([2], [[6, 3]], [3], [3], bucket=8)
    constrained.sampling["flags"] = CONSTRAINED
    first = workers.issue(constrained, words)
    second = workers.issue(batch([2], [[6, 3]], [1], [4], bucket=8)[0], no_words)
    assert not first.is_ready() and not second.is_ready()
    assert calls == ["forward", "words", "words", "words", "words"]
    is_known = True
    assert first.fetch().token_ids[0] == 7
    assert calls[5:] == ["words", "forward"]
    second.fetch()


def no_words() -> np.ndarray:
    raise AssertionError("no row is constrained")
