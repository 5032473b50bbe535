"""The launches of a program, in order, from the list of thunks that XLA dumps.

A command buffer is one CUDA graph, which costs the host a single launch. The program's HLO does not show
them; XLA makes them last, from thunks.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COMMAND_BUFFER = "kCommandBuffer"
_SLICES = "kDynamicSliceFusion"  # slices passed to the call within it instead of copies
_DUMP = "thunk_sequence_after_thunk_passes.txt"
_LINE = re.compile(r"^( *)\d+: (k\w+)")
# These launch nothing themselves.
_AROUND = {COMMAND_BUFFER, _SLICES, "kAsyncStart", "kAsyncDone", "kSequential"}
# All-reduces; from jax 0.11 on the second kind is XLA's own kernel, used instead of NCCL's.
ALL_REDUCES = ("kAllReduce", "kCollectiveKernel")


@dataclass(frozen=True, slots=True)
class Thunk:
    """A thunk: XLA's name for its kind, and the kinds of those around it, outermost first."""

    kind: str
    within: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launches:
    """The command buffers of a program, and the launches inside and outside of them, by kind.

    `sliced_calls` get a slice of an array in place.
    """

    command_buffers: int
    inside: dict[str, int]
    outside: dict[str, int]
    sliced_calls: int


def thunks(text: str) -> list[Thunk]:
    """The thunks of a dumped list, nested by its indentation."""
    closed: list[Thunk] = []
    open_ones: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            indent, kind = len(match[1]), match[2]
            while open_ones and open_ones[-1][0] >= indent:
                open_ones.pop()
            closed.append(Thunk(kind, tuple(kind for _, kind in open_ones)))
            open_ones.append((indent, kind))
    return closed


def launches(text: str) -> Launches:
    """The launches in a dumped list."""
    inside, outside = Counter[str](), Counter[str]()
    all_thunks = thunks(text)
    for thunk in all_thunks:
        if thunk.kind not in _AROUND:
            (inside if COMMAND_BUFFER in thunk.within else outside)[thunk.kind] += 1
    return Launches(
        command_buffers=sum(thunk.kind == COMMAND_BUFFER for thunk in all_thunks),
        inside=dict(inside),
        outside=dict(outside),
        sliced_calls=sum(thunk.kind not in _AROUND and _SLICES in thunk.within for thunk in all_thunks),
    )


def dumped_launches(folder: Path, function: str) -> Launches:
    """The launches of the only program of `function` that XLA dumped into a folder (`xla_dump_to`)."""
    (dump,) = folder.glob(f"*.jit_{function}.{_DUMP}")
    return launches(dump.read_text())
