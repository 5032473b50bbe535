"""The lists of thunks that XLA dumps, as jax 0.10.2 and 0.11.2 write them, shortened."""

from pathlib import Path

from bench.compiled.thunks import Launches, Thunk, dumped_launches, launches, thunks

ONE_GRAPH = """\
000: kCommandBuffer [source | sink] 
    001: kCustomKernel       [source       | next=002 (1)] loop_add_fusion_1 grid: [1280, 1, 1]
    002: kCopy               [source       | next=003 (1)] kCopy
    003: kDynamicSliceFusion [prev=002 (1) | next=005 (1)] params=5, results=3
        004: kCustomCall [source | sink] kCustomCall
    005: kCustomCall         [prev=003 (1) | sink        ] kCustomCall
"""  # noqa: W291
COLLECTIVES_APART = """\
001: kPartitionId   [source        | next=002 (1)] kPartitionId
003: kAsyncStart    [prev=002 (1)  | next=000 (2)] stream=computation_stream[0], async_id=3
    004: kCollectiveKernel [source | sink] kCollectiveKernel
005: kAsyncDone     [source        | sink        ] async_id=3
000: kCommandBuffer [prev=003 (2)  | next=019 (1)] 
    008: kCopy         [source       | next=014 (6)] kCopy
017: kAllReduce     [prev=000 (1) | next=000 (1)] kAllReduce
000: kCommandBuffer [prev=019 (2)  | next=027 (1)] 
    009: kCustomKernel [source       | sink] fusion
018: kWhile [prev=017 (1) | sink] trip_count=4
    019: kCommandBuffer [source | sink] 
        020: kCustomKernel [source | sink] fusion
"""  # noqa: W291


def test_indented_lines_are_nested() -> None:
    assert thunks(ONE_GRAPH)[-3:] == [
        Thunk("kDynamicSliceFusion", ("kCommandBuffer",)),
        Thunk("kCustomCall", ("kCommandBuffer", "kDynamicSliceFusion")),
        Thunk("kCustomCall", ("kCommandBuffer",)),
    ]


def test_calls_inside_and_outside_slices_are_distinguished() -> None:
    inside = {"kCustomKernel": 1, "kCopy": 1, "kCustomCall": 2}
    assert launches(ONE_GRAPH) == Launches(1, inside=inside, outside={}, sliced_calls=1)


def test_thunks_next_to_command_buffers_are_outside(tmp_path: Path) -> None:
    name = "module_0001.jit_forward.thunk_sequence_after_thunk_passes.txt"
    (tmp_path / name).write_text(COLLECTIVES_APART)
    (tmp_path / name.replace("forward", "score")).write_text(ONE_GRAPH)
    assert dumped_launches(tmp_path, "forward") == Launches(
        3,
        inside={"kCopy": 1, "kCustomKernel": 2},
        outside={"kPartitionId": 1, "kCollectiveKernel": 1, "kAllReduce": 1, "kWhile": 1},
        sliced_calls=0,
    )
