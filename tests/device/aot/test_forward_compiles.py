"""Forward programs compiled for GPUs that need not be present; skipped without the CUDA plugin.

    JAX_PLATFORMS=cpu python -m pytest tests/device/aot/test_forward_compiles.py

Each compiles in a separate process, so the result does not depend on this machine's GPU.
"""

from typing import Any

import pytest

from bench.compiled.forward_kernels import Program
from bench.compiled.thunks import ALL_REDUCES
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu


def compiled(*flags: str) -> list[dict[str, Any]]:
    """The report of `bench.compiled.compile_for_gpu` on each bucket's forward program."""
    return run_without_gpu("-m", "bench.compiled.compile_for_gpu", *flags)["programs"]


@needs_plugin
def test_gpt3_13b_is_one_command_buffer_and_passes_no_slices_to_attention() -> None:
    programs = compiled("--preset", "gpt3-13b", "--layers", "3", "--buckets", "1,2,32,512")
    assert [program["bucket"] for program in programs] == [1, 2, 32, 512]
    for program in programs:
        launches = program["launches"]
        assert program["attention"] == "split-attention kernel"
        assert launches["sliced_calls"] == 0, program
        assert launches["command_buffers"] == 1 and launches["outside"] == {}, program
        assert launches["inside"]["kCustomCall"] >= 3, program  # the attention of each layer is inside


@needs_plugin
@pytest.mark.parametrize("device", ["a100-80gb", "l40s", "h200", "b200"])
def test_a_small_model_is_one_command_buffer_on_each_gpu(device: str) -> None:
    (program,) = compiled("--preset", "gpt2", "--layers", "3", "--buckets", "8", "--device", device)
    assert (program["attention"] == "split-attention kernel") == (device == "h200")
    assert program["dynamic_loops"] == 0  # the host reads nothing back
    assert program["launches"]["sliced_calls"] == 0
    assert program["launches"]["command_buffers"] == 1 and program["launches"]["outside"] == {}


@needs_plugin
@pytest.mark.long
@pytest.mark.parametrize(("preset", "temporaries"), [("qwen3-30b-a3b", 150e6), ("mixtral-8x7b", 380e6)])
def test_mixtures_copy_no_weights_and_a_token_once_per_chosen_expert(preset: str, temporaries: float) -> None:
    few, many = compiled("--preset", preset, "--layers", "2", "--buckets", "32,2048")
    assert few["temporaries"] < 6e6  # an expert of Qwen's has 9 MB, and a layer 1.2 GB
    assert (
        many["temporaries"] < temporaries
    )  # XLA's own product of experts takes 9.4 GB for one layer of Qwen's
    for program in (few, many):
        launches = program["launches"]
        assert program["dynamic_loops"] == program["static_loops"] == 0
        assert launches["sliced_calls"] == 0 and launches["outside"] == {}, program
        assert launches["command_buffers"] == 1
        assert launches["inside"]["kCustomCall"] == 2 * 3, program  # attention, and two products of experts


@needs_plugin
@pytest.mark.long
def test_mixtures_on_gpus_without_the_kernel_have_no_loop_for_few_tokens() -> None:
    flags = ("--preset", "qwen3-30b-a3b", "--layers", "1", "--buckets", "8", "--device", "a100-80gb")
    (program,) = compiled(*flags)
    assert program["temporaries"] < 20e6  # no weight is copied: a layer's are 1.2 GB
    assert program["static_loops"] == program["dynamic_loops"] == 0


@needs_plugin
@pytest.mark.parametrize("recorded", [False, True])
def test_eight_gpus_have_collectives_in_command_buffers_only_if_enabled(
    recorded: bool,
) -> None:
    flags = ["--preset", "gpt3-13b", "--layers", "2", "--buckets", "8", "--tensor-parallel", "8"]
    (program,) = compiled(*flags, *(["--command-buffer-collectives"] if recorded else []))
    launches = program["launches"]
    inside, outside = (
        sum(n for kind, n in launches[where].items() if kind in ALL_REDUCES)
        for where in ("inside", "outside")
    )
    sums = 2 * 2 + 1  # two a layer, and that of the embedding
    if recorded:
        assert (inside, outside) == (sums, 0)
        assert launches["command_buffers"] == 1 and launches["outside"] == {}, program
    else:
        assert (inside, outside) == (0, sums)
        assert program["sums"] == {"ONE_SHOT": sums}  # XLA's own kernel, not NCCL's


FOLDED = """\
HloModule jit_forward

FileNames
1 "orca_jax/model/attention.py"

FunctionNames
1 "LayerNorm.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%around (p0: s32[1976], p1: bf16[8,12,64]) -> bf16[8,12,64] {
  %p0 = s32[1976]{0} parameter(0)
  %slice.1 = s32[512]{0} slice(%p0), slice={[448:960]}
  %p1 = bf16[8,12,64]{2,1,0} parameter(1)
  ROOT %call.1 = bf16[8,12,64]{2,1,0} custom-call(%slice.1, %p1), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(forward)/split_attention/mpmd_map" stack_frame_id=1}
}

ENTRY %main (b: s32[1976], q: bf16[8,12,64]) -> bf16[8,12,64] {
  %b = s32[1976]{0} parameter(0)
  %q = bf16[8,12,64]{2,1,0} parameter(1)
  %add.1 = bf16[8,12,64]{2,1,0} add(%q, %q), metadata={stack_frame_id=1}
  %plain = bf16[8,12,64]{2,1,0} custom-call(%b, %add.1), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(forward)/split_attention/mpmd_map" stack_frame_id=1}
  ROOT %folded = bf16[8,12,64]{2,1,0} fusion(%b, %plain), kind=kCustom, calls=%around
}
"""


def test_an_attention_call_with_folded_slices_is_recognised() -> None:
    kernels = list(Program(FOLDED).kernels())
    assert [kernel.computes for kernel in kernels] == [("LayerNorm",), ("attention",), ("attention",)]
    assert [kernel.sliced for kernel in kernels] == [False, False, True]
    assert kernels[2].kind == "mosaic_gpu_v2"
