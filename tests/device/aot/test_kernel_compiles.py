"""Kernels compiled by XLA and Mosaic for a described H200; skipped without the CUDA plugin.

    JAX_PLATFORMS=cpu python -m pytest tests/device/aot/test_kernel_compiles.py

Each compiles in a separate process, so the result does not depend on the machine's GPU.
"""

from typing import Any

import pytest

from bench.compiled import compile_experts, compile_latent
from bench.compiled.compile_kernel import SIZES, Size, figures
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu

pytestmark = needs_plugin


def forward_kernels(n_tokens: int, n_layers: int) -> dict[str, Any]:
    """The report of `bench.compiled.forward_kernels` on the forward program of GPT-3 13B for `n_tokens`."""
    flags = ["--preset", "gpt3-13b", "--buckets", str(n_tokens), "--layers", str(n_layers)]
    (program,) = run_without_gpu("-m", "bench.compiled.forward_kernels", *flags)["programs"]
    return program


def of_one_layer(program: dict[str, Any]) -> list[set[str]]:
    """For each kernel of a middle layer, the operations that are fused into it."""
    for kernel in program["layer"]:  # no copies, transposes or loops
        assert kernel["kind"] in {
            *("kLoop", "kInput", "triton", "triton_nested_gemm_fusion"),
            *("mosaic_gpu_v2", "__gpu$xla.gpu.triton"),
        }
    return [set(kernel["computes"]) for kernel in program["layer"]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_compiles_for_every_head_size_dtype_and_group(size: Size) -> None:
    compiled = figures(size)  # raises if shared memory is too small
    group = size.n_heads // size.n_kv_heads
    assert compiled.registers <= 168  # per thread: 384 threads share 65,536
    # Registers are spilled outside the loops over keys. Heads of 256 leave none to spare: a loop over whole
    # slots reloads two invariants, and one over masked slots, which an item has few of, six.
    assert sum(loop.n_spills for loop in compiled.key_loops) <= (12 if size.head_size == 256 else 0), compiled
    if size.head_size <= 128:
        assert compiled.spill_stores <= 80, compiled
    if size.head_size == 128 and compiled.key_loops:  # of tiles and entries, whole and masked; 128 keys each
        assert len(compiled.key_loops) == 4
        most = 515 if group == 1 else 545
        if size.soft_cap is not None:
            most += 7 * 64  # tanh of a thread's 64 scores
        assert sorted(loop.n_instructions for loop in compiled.key_loops)[1] <= most
    assert compiled.descriptors
    assert not [
        (descriptor, broken) for descriptor in compiled.descriptors if (broken := descriptor.broken_rules())
    ]
    # Copies that cannot be clipped at a row's end are never longer than their rows: a query, a part, and
    # tops.
    row, padded = 2 * size.head_size, -(-group // 8) * 8
    assert set(compiled.plain_copies) <= {row, row * group, row * 64, 4 * 64, 4 * padded}


def test_gpt3_13b_calls_the_kernel_once_a_layer_and_xla_fuses_the_rest() -> None:
    program = forward_kernels(32, 40)
    assert program["attention_calls"] == 40
    kernels = of_one_layer(program)
    # One kernel adds up a product and applies bias and what follows; each norm is one kernel.
    assert kernels.count({"LayerNorm"}) == sum("LayerNorm" in kernel for kernel in kernels) == 2
    assert kernels.count({"product"}) == 4
    assert kernels.count({"sum of a product", "bias", "residual"}) == 2
    assert kernels.count({"sum of a product", "bias", "activation"}) == 1
    assert kernels.count({"attention"}) == 1
    assert sum("merge" in kernel for kernel in kernels) <= 2
    assert len(kernels) <= 15


def test_with_many_tokens_the_product_adds_the_bias_and_the_norm_the_residual() -> None:
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


@pytest.mark.parametrize("size", compile_experts.SIZES, ids=str)
def test_the_experts_kernel_compiles_for_few_rows_and_many(size: compile_experts.Size) -> None:
    compiled = compile_experts.figures(size)  # raises if shared memory is too small
    assert compiled.registers <= 168 and compiled.spill_stores == compiled.spill_loads == 0
    assert len(compiled.descriptors) > 4  # weights, rows, and copies of results
    assert not [
        (descriptor, broken) for descriptor in compiled.descriptors if (broken := descriptor.broken_rules())
    ]
    # A copy of one row is not clipped at its end: it has the 64 columns of a warp group, which are all there.
    assert set(compiled.plain_copies) == {128}


@pytest.mark.parametrize("size", compile_latent.SIZES, ids=str)
def test_the_latent_kernel_compiles_for_whole_models_and_shared_ones(size: compile_latent.Size) -> None:
    compiled = compile_latent.figures(size)  # raises if shared memory is too small
    assert compiled.registers <= 168
    # As for heads of 256, the sums of 512 values leave no registers to spare. With 20 heads 3 of 32 spills
    # are in the loop over whole slots, the others in masked slots, of which an item has one.
    assert sum(loop.n_spills for loop in compiled.key_loops) <= (32 if size.rank == 512 else 0), compiled
    assert compiled.descriptors
    assert not [
        (descriptor, broken) for descriptor in compiled.descriptors if (broken := descriptor.broken_rules())
    ]
    group = compile_latent.latent_plan(1, 1, size.n_heads, size.block_size, 132).group
    assert set(compiled.plain_copies) <= {4 * group}  # tops; the group's all are there


@pytest.mark.parametrize("device", ["a100-80gb", "h200", "b200"])
def test_the_kernel_that_writes_keys_and_values_compiles_and_copies_no_cache(device: str) -> None:
    programs = run_without_gpu("-m", "tests.device.aot.place_programs", device)
    assert len(programs) == 10
    for size, (kernels, launches) in programs.items():
        assert kernels == launches == 1, size
