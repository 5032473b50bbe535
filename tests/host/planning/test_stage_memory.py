"""The memory of a stage by arithmetic: worked by hand, and against what XLA planned."""

from dataclasses import replace

import pytest

from orca_jax.config import ParallelConfig, ServingConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_bytes
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Rotary
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.plan import PlanTarget, make_plan
from orca_jax.planning.sizes import engine_shape
from orca_jax.planning.stage_memory import (
    result_bytes,
    slot_bytes,
    table_bytes,
    temporary_bytes,
)
from tests.gpt_config import gpt_config

SMALL = gpt_config(vocab_size=10, n_positions=8, hidden_size=4, n_layers=3, n_heads=2, ffn_size=16)
SHAPE = engine_shape(SMALL, ServingConfig(max_batch_size=2, max_batch_tokens=8, block_size=4), n_workers=1)


def test_weights_of_a_stage_worked_by_hand() -> None:
    # A layer, of H = 4 and F = 16: qkv 12 x 4 + 12, out 4 x 4 + 4, up 16 x 4 + 16, down 4 x 16 + 4, norms 16.
    layer = 60 + 20 + 80 + 68 + 16
    token, position, norm = 10 * 4, 8 * 4, 8
    assert stage_bytes(SMALL, range(3), 1, 4) == 4 * (token + position + 3 * layer + norm)
    assert stage_bytes(SMALL, range(2), 1, 4) == 4 * (token + position + 2 * layer)
    assert stage_bytes(SMALL, range(2, 3), 1, 4) == 4 * (token + layer + norm)  # the head is the table
    assert stage_bytes(SMALL, range(1, 2), 1, 2) == 2 * layer
    # Over two devices: qkv 6 x 4 + 6, out 4 x 2 + 4 (its bias is whole), up 8 x 4 + 8, down 4 x 8 + 4, norms.
    split = 30 + 12 + 40 + 36 + 16
    assert stage_bytes(SMALL, range(3), 2, 4) == 4 * (5 * 4 + position + 3 * split + norm)


def test_slots_and_tables_worked_by_hand() -> None:
    assert slot_bytes(SMALL, range(2), 1, 4) == 2 * 2 * 4 * 4  # a key and a value of 4 elements in 2 layers
    assert slot_bytes(SMALL, range(2), 2, 2) == 2 * 2 * 2 * 2
    n_heads, in_codes = SMALL.n_kv_heads, SMALL.with_kv_code("int8")
    assert slot_bytes(in_codes, range(2), 1, 4) == 2 * 2 * (4 + n_heads * 4)  # bytes of elements, and scales
    assert table_bytes(SMALL, range(1, 3), 64) == 64 * (10 * 4 + 10 * 4 + 4)
    assert table_bytes(SMALL, range(2), 64) == 64 * 4


@pytest.mark.parametrize(
    ("max_batch_size", "max_batch_tokens", "compiled"),
    [(32, 2048, 335.6), (8, 2048, 233.3), (32, 512, 186.4)],  # MB by XLA for an A100, bench/LOG.md
)
def test_attention_by_cudnn_needs_what_xla_planned(
    max_batch_size: int, max_batch_tokens: int, compiled: float
) -> None:
    model, layers = PRESETS["gpt3-13b"], range(2)
    serving = ServingConfig(max_batch_size=max_batch_size, n_slots=16000, max_batch_tokens=max_batch_tokens)
    shape = engine_shape(model, serving, n_workers=1)
    needed, kept = (
        temporary_bytes(model, layers, 1, shape, itemsize=2, attention="cudnn"),
        result_bytes(model, layers, 2, n_tokens=max_batch_tokens, n_rows=max_batch_size),
    )
    assert (needed - kept) / 1e6 == pytest.approx(compiled, rel=0.01)
    fixed = replace(shape, deterministic=True)  # static shapes replace cuDNN there
    static = temporary_bytes(model, layers, 1, fixed, itemsize=2, attention="static")
    assert temporary_bytes(model, layers, 1, fixed, itemsize=2, attention="cudnn") == static > needed


def test_kept_results_worked_by_hand() -> None:
    # Of two iterations: T = 8 tokens, H = 4, R = 2 rows, V = 10, 4 bytes each.
    def kept(layers: range) -> int:
        return result_bytes(SMALL, layers, 4, n_tokens=8, n_rows=2)

    hidden, logits = 8 * 4 * 4, 2 * 10 * 4
    assert kept(range(1)) == 2 * hidden
    assert kept(range(1, 2)) == 2 * (hidden + hidden), "what arrives from the stage before, and the output"
    assert kept(range(1, 3)) == 2 * (hidden + hidden + logits)
    assert kept(range(3)) == 2 * (hidden + logits)


def test_each_kind_of_rotary_positions_has_its_cosines_and_sines_once() -> None:
    near, far = Rotary(size=2), Rotary(size=2, base=1e6)
    layers = tuple(
        layer.with_attention(rotary=rotary)
        for layer, rotary in zip(SMALL.layers, (near, far, near), strict=True)
    )

    def needed(model: ModelConfig, n_layers: int) -> int:
        return temporary_bytes(model, range(n_layers), 1, SHAPE, itemsize=4, attention="kernel")

    tables = 8 * (1 + 1) * 4  # T = 8 tokens, a float32 cosine and sine for each of a head's pairs, of which 1
    for n_layers, n_kinds in ((1, 1), (2, 2)):
        rotated = needed(replace(SMALL, layers=layers), n_layers)
        assert rotated - needed(SMALL, n_layers) == n_kinds * tables


def test_a_gated_layers_activation_needs_an_array_of_its_own() -> None:
    layers = tuple(layer.with_feed_forward(gated=True) for layer in SMALL.layers)

    def elements(model: ModelConfig, n_devices: int = 1) -> float:
        needed = temporary_bytes(model, range(1), n_devices, SHAPE, itemsize=4, attention="kernel")
        return (needed - result_bytes(model, range(1), 4, n_tokens=8, n_rows=2)) / (8 * 4)

    # Per token, with H = 4 and F = 16: the residual stream, and the first product with its input (2 F + H) or
    # with the activation, half as wide (2 F + F).
    assert elements(SMALL) == 4 + 16 + 4
    assert elements(replace(SMALL, layers=layers)) == 4 + 32 + 16
    wide = tuple(layer.with_feed_forward(size=6, gated=True) for layer in SMALL.layers)
    assert elements(replace(SMALL, layers=wide), 2) == 4 + 6 + 4, "3 elements of F on each device: H is more"


@pytest.mark.parametrize(
    ("name", "n_stages", "tensor", "compiled", "within"),
    # MB of the forward pass by XLA for H200s, bench/LOG.md. In the 405B's XLA leaves a gap of 537 MB.
    [
        ("llama-3.1-8b", 1, 1, 12416.3, 0.001),
        ("llama-3.1-70b", 1, 4, 8121.5, 0.001),
        ("llama-3.1-405b", 2, 8, 12684.9, 0.05),
    ],
)
def test_a_llama_needs_what_xla_planned(
    name: str, n_stages: int, tensor: int, compiled: float, within: float
) -> None:
    plan = make_plan(
        PlanTarget(
            config=PRESETS[name],
            device=GPUS["h200"],
            sizes=Sizes(max_batch_tokens=131_072),
            dtype="bfloat16",
            context=512,
            parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor),
        )
    )
    stage, model = plan.stages[0], plan.target.model
    tokens, rows = plan.serving.max_batch_tokens, plan.serving.max_batch_size
    kept = result_bytes(model, stage.layers, 2, n_tokens=tokens, n_rows=rows)
    assert (stage.memory.temporaries - kept) / 1e6 == pytest.approx(compiled, rel=within)
