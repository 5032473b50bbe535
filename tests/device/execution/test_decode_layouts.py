"""Decode in programs of its own, for contexts of some lengths: the tokens stay those of the reference.

GPUs without a kernel for a model run it with static shapes. Those run on a CPU too if they are asked for.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import Attention, ServingConfig
from orca_jax.cudnn.paged_attention_reference import paged_attention_reference
from orca_jax.execution import attention_backend
from orca_jax.execution.attention_paths import Cudnn
from orca_jax.execution.worker import Worker
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, FlatBatch, FlatLayout
from orca_jax.request.request import Request
from orca_jax.service.prepared_params import RuleMaker
from tests.device.harness import greedy_request, harness
from tests.device.model.golden import load_golden
from tests.device.model.golden_encoders import load_golden_encoder
from tests.device.model.test_golden import FIRST

BLOCK, TIERS = 4, (8, 24, None)
# Families that together have grouped heads, windows, sinks, ALiBi, soft caps and latent keys.
QUICK = {"bloom", "deepseek_v3", "gemma2", "gpt_oss"}
N_PROMPTS, N_ROWS = 9, 4


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> set[FlatLayout]:
    """The layouts of all iterations, from here on; tiers are short enough for small models."""
    used: set[FlatLayout] = set()
    forward = Worker.forward

    def recorded(self: Worker, flat: FlatBatch, arrived: Any) -> Any:
        used.add(flat.layout)
        return forward(self, flat, arrived)

    monkeypatch.setattr(Worker, "forward", recorded)
    for kind in ("static", "cudnn"):
        monkeypatch.setitem(DECODE_CONTEXTS, kind, TIERS)
    return used


def families() -> Iterator[Any]:
    for family, name in FIRST.items():
        yield pytest.param(name, marks=() if family in QUICK else pytest.mark.matrix)


def run(name: str, attention: Attention | None) -> None:
    golden = load_golden(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config
    serving = ServingConfig(
        max_batch_size=N_ROWS,
        n_slots=N_ROWS * -(-model.n_positions // BLOCK) * BLOCK,
        max_batch_tokens=model.n_positions,
        block_size=BLOCK,
    )
    engine = harness(
        model, checkpoint.parameters, serving, buckets=(N_ROWS, model.n_positions), attention=attention
    )
    by_length = sorted(range(len(golden.prompts)), key=lambda i: len(golden.prompts[i]))
    numbers = [by_length[i] for i in np.linspace(0, len(by_length) - 1, N_PROMPTS, dtype=int)]
    asked = [greedy_request(str(i), golden.prompts[i], len(golden.outputs[i])) for i in numbers]
    for key, tokens in engine.run(asked, [4 * i for i in range(len(asked))]).items():
        sure = golden.sure(int(key))
        assert tuple(tokens[: len(sure)]) == sure, (name, key)


@pytest.mark.parametrize("name", [*families()])
def test_tokens_of_every_family_by_static_programs_with_tiers(name: str, layouts: set[FlatLayout]) -> None:
    run(name, "static")
    longest = load_checkpoint(load_golden(name).directory, dtype=jnp.float32).config.n_positions
    tiers = {layout.max_blocks for layout in layouts if layout.one_each}
    assert tiers == {8 // BLOCK, 24 // BLOCK, -(-longest // BLOCK)}
    assert {layout.n_tokens for layout in layouts if not layout.one_each} <= {N_ROWS, longest}


def test_static_programs_without_tiers(layouts: set[FlatLayout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODE_CONTEXTS, "static", ())
    run(FIRST["deepseek_v3"], "static")
    assert layouts and not any(layout.one_each for layout in layouts)


def test_tokens_by_cudnn_with_tiers(layouts: set[FlatLayout], monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each layer of a decode, and none for tiles of prompts."""
    n_entries: list[int] = []

    def call(q: Any, *arrays: Any, scale: float) -> Any:
        n_entries.append(q.shape[1])
        return paged_attention_reference(q, *arrays, scale=scale)

    path = attention_backend._OnDevice.path

    def with_reference(self: Any, kind: Attention) -> Any:
        chosen, description = path(self, kind)
        assert isinstance(chosen, Cudnn)
        return replace(chosen, call=call, places=True, interpret=True), description

    monkeypatch.setattr(attention_backend._OnDevice, "path", with_reference)
    monkeypatch.setattr(attention_backend._OnDevice, "_not_cudnn", lambda *_: None)
    run(FIRST["gpt_oss"], "cudnn")
    assert {layout.max_blocks for layout in layouts if layout.one_each} >= {2, 6}
    assert n_entries


@pytest.mark.parametrize("name", ["t5-gated", pytest.param("bart-gelu", marks=pytest.mark.long)])
def test_tokens_with_an_encoder(name: str, layouts: set[FlatLayout]) -> None:
    golden = load_golden_encoder(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config
    assert model.encoder is not None
    n_output, start = 16, model.decoder_start_token_id
    assert start is not None
    if not model.positions:
        model = replace(model, n_positions=28, encoder=replace(model.encoder, n_positions=64))
        assert model.encoder is not None
    rules = RuleMaker(model, None).rules(greedy_request("", (0,), n_output).sampling)

    def request(i: int) -> Request:
        plain = greedy_request(str(i), (start,), n_output)
        return replace(plain, encoder_ids=golden.inputs[i], constraint=rules.constraint())

    serving = ServingConfig(
        max_batch_size=3,
        n_slots=8 * (model.n_positions + model.encoder.n_positions),
        max_batch_tokens=72,
        block_size=BLOCK,
    )
    engine = harness(model, checkpoint.parameters, serving, buckets=(3, 72), attention="static")
    outputs = engine.run([request(i) for i in range(0, 24, 4)], [*range(0, 12, 2)])
    for key, tokens in outputs.items():
        sure = golden.sure(int(key))
        assert tuple(tokens[: len(sure)]) == sure, key
    assert {layout.max_blocks for layout in layouts if layout.one_each} >= {2, 6}
