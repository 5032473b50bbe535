"""What XLA launches for a program, in its order, read from the list of thunks that it dumps.

A command buffer is one CUDA graph: what it holds costs the host one launch together. The program's HLO does
not show them; XLA makes them last, of thunks.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

COMMAND_BUFFER = "kCommandBuffer"
_SLICES = "kDynamicSliceFusion"  # slices that the call within it is given in place of copies
_DUMP = "thunk_sequence_after_thunk_passes.txt"
_LINE = re.compile(r"^( *)\d+: (k\w+)")
# They launch nothing themselves.
_AROUND = {COMMAND_BUFFER, _SLICES, "kAsyncStart", "kAsyncDone", "kSequential"}
# All-reduces; from jax 0.11 on the second kind is XLA's own kernel in place of NCCL's.
ALL_REDUCES = ("kAllReduce", "kCollectiveKernel")


@dataclass(frozen=True, slots=True)
class Thunk:
    """One of them: XLA's name for its kind, and the kinds of those that it lies in, the outermost first."""

    kind: str
    within: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launches:
    """The command buffers of a program, and what is launched in them and outside of them, by kind.

    `sliced_calls` are given a slice of an array where it lies.
    """

    command_buffers: int
    inside: dict[str, int]
    outside: dict[str, int]
    sliced_calls: int


def thunks(text: str) -> list[Thunk]:
    """Those of a dumped list, by their indentation."""
    found: list[Thunk] = []
    open_ones: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            indent, kind = len(match[1]), match[2]
            while open_ones and open_ones[-1][0] >= indent:
                open_ones.pop()
            found.append(Thunk(kind, tuple(kind for _, kind in open_ones)))
            open_ones.append((indent, kind))
    return found


def launches(text: str) -> Launches:
    """What a dumped list launches."""
    inside, outside = Counter[str](), Counter[str]()
    found = thunks(text)
    for thunk in found:
        if thunk.kind not in _AROUND:
            (inside if COMMAND_BUFFER in thunk.within else outside)[thunk.kind] += 1
    return Launches(
        command_buffers=sum(thunk.kind == COMMAND_BUFFER for thunk in found),
        inside=dict(inside),
        outside=dict(outside),
        sliced_calls=sum(thunk.kind not in _AROUND and _SLICES in thunk.within for thunk in found),
    )


def dumped_launches(folder: Path, function: str) -> Launches:
    """Those of the one program of `function` that XLA dumped into a folder (`xla_dump_to`)."""
    (dump,) = folder.glob(f"*.jit_{function}.{_DUMP}")
    return launches(dump.read_text())
