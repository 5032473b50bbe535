"""Launches, trips and bytes counted in the text of compiled programs, as XLA writes it, shortened."""

import pytest

from bench.compiled.hlo_traffic import Counts, counts

KB = 1024


def program(entry: str, *computations: str) -> str:
    return "\n\n".join(
        ["HloModule jit_forward", *computations, f"ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}"]
    )


def moved(entry: str, *computations: str, stated: dict[str, float] | None = None) -> tuple[float, float]:
    counted = counts(program(entry, *computations), stated)
    return counted.read, counted.written


SLICED = """\
%fused (param_0.1: bf16[64,8,32], param_1.2: s32[]) -> f32[8,32] {
  %param_0.1 = bf16[64,8,32]{2,1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,8,32]{2,1,0} dynamic-slice(%param_0.1, %param_1.2, %zero, %zero)
  %bitcast.1 = bf16[8,32]{1,0} bitcast(%dynamic-slice.1)
  ROOT %convert.1 = f32[8,32]{1,0} convert(%bitcast.1)
}"""
UPDATED = """\
%fused (param_0: f32[1024,256], param_1: f32[1,256], param_2: s32[]) -> f32[1024,256] {
  %param_0 = f32[1024,256]{1,0} parameter(0)
  %param_1 = f32[1,256]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %negate.1 = f32[1,256]{1,0} negate(%param_1)
  ROOT %dynamic-update-slice.1 = f32[1024,256]{1,0} dynamic-update-slice(%param_0, %negate.1, %param_2, %zero)
}"""
LOOP = """\
  %start = (s32[], f32[1024,256]{1,0}, /*index=2*/f32[1,256]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[1024,256], /*index=2*/f32[1,256]) while(%start), condition=%cond, body=%body"""
BODY = """\
%body (arg: (s32[], f32[1024,256], f32[1,256])) -> (s32[], f32[1024,256], f32[1,256]) {
  %arg = (s32[], f32[1024,256]{1,0}, /*index=2*/f32[1,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %big = f32[1024,256]{1,0} get-tuple-element(%arg), index=1
  %small = f32[1,256]{1,0} get-tuple-element(%arg), index=2
  %fusion.7 = f32[1024,256]{1,0} fusion(%big, %small, %i), kind=kLoop, calls=%fused
  ROOT %tuple.2 = (s32[], f32[1024,256]{1,0}, f32[1,256]{1,0}) tuple(%i, %fusion.7, %small)
}"""


def test_a_slice_in_a_fusion_reads_what_it_takes() -> None:
    entry = """\
  %table = bf16[64,8,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %fusion.1 = f32[8,32]{1,0} fusion(%table, %at), kind=kLoop, calls=%fused, metadata={op_name="a(b)"}"""
    assert moved(entry, SLICED) == (8 * 32 * 2 + 4, 8 * 32 * 4)


def test_an_operand_that_is_sliced_and_also_read_whole_counts_once_whole() -> None:
    both = SLICED.replace(
        "  ROOT %convert.1 = f32[8,32]{1,0} convert(%bitcast.1)",
        "  %convert.1 = f32[8,32]{1,0} convert(%bitcast.1)\n"
        "  %reduce.1 = bf16[8,32]{1,0} reduce(%param_0.1, %zero), dimensions={0}, to_apply=%add\n"
        "  ROOT %tuple.1 = (f32[8,32]{1,0}, bf16[8,32]{1,0}) tuple(%convert.1, %reduce.1)",
    )
    entry = """\
  %table = bf16[64,8,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %fusion.1 = (f32[8,32]{1,0}, bf16[8,32]{1,0}) fusion(%table, %at), kind=kInput, calls=%fused"""
    assert moved(entry, both) == (64 * 8 * 32 * 2 + 4, 8 * 32 * 4 + 8 * 32 * 2)


@pytest.mark.parametrize("trips", [0, 3])
def test_a_loop_counts_as_often_as_it_runs_and_its_updates_in_place(trips: int) -> None:
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    counted = counts(program(LOOP + known, UPDATED, BODY))
    assert counted == Counts(launches=trips, trips=trips, read=trips * (KB + 4), written=trips * KB)


def test_a_loop_that_the_host_leads_is_reported() -> None:
    counted = counts(program(LOOP, UPDATED, BODY))
    assert (counted.host_led, counted.trips, counted.launches) == (1, 1, 1)


def test_a_kernel_reads_what_is_stated_of_an_array_and_writes_no_workspace() -> None:
    entry = """\
  %x = bf16[32,64]{1,0} parameter(0)
  %cache = bf16[512,8,16,128]{3,2,1,0} parameter(1)
  %call.1 = (bf16[32,64], bf16[512,8,16,128]) custom-call(%x, %cache), custom_call_target="mosaic_gpu_v2"
  %y = bf16[32,64]{1,0} get-tuple-element(%call.1), index=0
  ROOT %gemm = (bf16[32,64]{1,0}, s8[4194304]{0}) custom-call(%y, %x), custom_call_target="__cublas$lt$matmul"
"""
    cache = "bf16[512,8,16,128]"
    counted = counts(program(entry), {cache: 100.0})
    array = 32 * 64 * 2
    assert counted == Counts(launches=2, read=3 * array + 100, written=2 * array, stated={cache: 1})


def test_a_conditional_counts_its_larger_branch() -> None:
    branch = """\
%{0} (p: f32[{1}]) -> f32[{1}] {{
  %p = f32[{1}]{{0}} parameter(0)
  ROOT %c = f32[{1}]{{0}} copy(%p)
}}"""
    entry = """\
  %which = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %y = f32[16]{0} parameter(2)
  ROOT %conditional.1 = f32[] conditional(%which, %x, %y), branch_computations={%few, %many}"""
    assert moved(entry, branch.format("few", 8), branch.format("many", 16)) == (64, 64)


def test_asynchronous_operations_launch_once() -> None:
    entry = """\
  %x = f32[1024]{0} parameter(0)
  %all-reduce-start.1 = f32[1024]{0} all-reduce-start(%x), to_apply=%add
  ROOT %all-reduce-done.1 = f32[1024]{0} all-reduce-done(%all-reduce-start.1)"""
    assert counts(program(entry)) == Counts(launches=1, read=4 * KB, written=4 * KB)


@pytest.mark.parametrize(
    ("dtype", "size"), [("pred", 1), ("f8e4m3fn", 1), ("u4", 0.5), ("bf16", 2), ("s64", 8)]
)
def test_a_gather_reads_the_rows_that_it_takes(dtype: str, size: float) -> None:
    entry = f"""\
  %table = {dtype}[1000,64]{{1,0}} parameter(0)
  %at = s32[8,1]{{1,0}} parameter(1)
  ROOT %gather.1 = {dtype}[8,64]{{1,0}} gather(%table, %at), offset_dims={{1}}"""
    assert moved(entry) == (8 * 64 * size, 8 * 64 * size)
