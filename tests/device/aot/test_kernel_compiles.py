"""What XLA and Mosaic compile for an H200 that need not be there; skipped without the CUDA plugin.

    JAX_PLATFORMS=cpu python -m pytest tests/device/aot/test_kernel_compiles.py

In processes of their own: a machine's own GPU, or the lack of one, has no say.
"""

from typing import Any

import pytest

from bench.compiled.compile_kernel import SIZES, figures
from tests.device.aot.without_gpu import needs_plugin, told_apart

pytestmark = needs_plugin


def forward_kernels(n_tokens: int, n_layers: int) -> dict[str, Any]:
    """What `bench.compiled.forward_kernels` finds in the forward program of GPT-3 13B for so many tokens."""
    flags = ["--preset", "gpt3-13b", "--buckets", str(n_tokens), "--layers", str(n_layers)]
    (program,) = told_apart("-m", "bench.compiled.forward_kernels", *flags)["programs"]
    return program


def of_one_layer(program: dict[str, Any]) -> list[set[str]]:
    """What each kernel of a middle layer computes."""
    for kernel in program["layer"]:  # nothing is copied, turned round or looped over
        assert kernel["kind"] in {"kLoop", "kInput", "triton", "triton_nested_gemm_fusion", "mosaic_gpu_v2"}
    return [set(kernel["computes"]) for kernel in program["layer"]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_compiles_for_every_head_size_and_dtype(size: tuple[int, str, int, int, int]) -> None:
    head_size, _, _, n_heads, n_kv_heads = size
    result = figures(size)  # it raises where shared memory would not do
    assert result.registers <= 168  # of a thread: 384 of them share 65,536
    # Registers are spilled outside the loops over keys. Heads of 256 have none to spare: jax 0.10 reloads two
    # in the loop that a row's last slot is for.
    most = 2 if head_size == 256 else 0
    assert sum(loop.n_spills for loop in result.key_loops) <= most, result
    if head_size <= 128:
        assert result.spill_stores <= 80, result
    if head_size == 128 and result.key_loops:  # of tiles and of rows: 128 keys that every query sees
        assert len(result.key_loops) == 4
        assert sorted(loop.n_instructions for loop in result.key_loops)[1] <= 520
    assert result.descriptors
    assert not [(one, broken) for one in result.descriptors if (broken := one.broken_rules())]
    # What knows no rows is never longer than the rows it is for: a query's group, a tile's part, and tops.
    row, padded = 2 * head_size, -(-n_heads // n_kv_heads // 8) * 8
    assert set(result.plain_copies) <= {row, row * (n_heads // n_kv_heads), row * 64, 4 * 64, 4 * padded}


def test_gpt3_13b_calls_the_kernel_once_a_layer_and_xla_fuses_the_rest() -> None:
    program = forward_kernels(32, 40)
    assert program["attention_calls"] == 40
    kernels = of_one_layer(program)
    # Sums, biases and what follows them are in one kernel; both norms are one kernel each.
    assert kernels.count({"LayerNorm"}) == sum("LayerNorm" in kernel for kernel in kernels) == 2
    assert kernels.count({"product"}) == 4
    assert kernels.count({"sum of a product", "bias", "residual"}) == 2
    assert kernels.count({"sum of a product", "bias", "activation"}) == 1
    assert kernels.count({"attention"}) == 1
    assert sum("merge" in kernel for kernel in kernels) <= 2
    assert len(kernels) <= 15


def test_many_tokens_have_the_bias_in_the_product_and_the_residual_in_the_norm() -> None:
    program = forward_kernels(2048, 4)
    assert program["attention_calls"] == 4
    kernels = of_one_layer(program)
    assert kernels.count({"product", "bias"}) == sum("product" in kernel for kernel in kernels) == 4
    assert kernels.count({"activation"}) == 1
    assert sum("LayerNorm" in kernel for kernel in kernels) == 2
    assert {"residual", "LayerNorm"} in kernels
    assert kernels.count({"attention"}) == 1
    assert sum("merge" in kernel for kernel in kernels) <= 2
    assert len(kernels) <= 14
