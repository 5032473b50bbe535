"""The collectives of a compiled program, read from its text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

_KINDS = r"all-reduce|all-gather|reduce-scatter|collective-\w+|(?:ragged-)?all-to-all"
# `%name = TYPE kind(`; of a start/done pair only the start counts.
_CALL = re.compile(
    rf"^\s*(?:ROOT )?%?\S+ = (?P<type>.+?) (?P<kind>{_KINDS})(?P<start>-start)?\(", re.MULTILINE
)
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: its kind, and the bytes of its result on each device."""

    kind: str
    n_bytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives in an optimized program's text, in order; those of a loop's body once."""
    return [
        Collective(call["kind"], _result_bytes(call["type"], call["kind"], started=call["start"] is not None))
        for call in _CALL.finditer(text)
    ]


def counts(text: str) -> Counter[str]:
    """The number of collectives of each kind."""
    return Counter(collective.kind for collective in collectives(text))


def _result_bytes(result: str, kind: str, *, started: bool) -> int:
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n) * _itemsize(dtype)
        for dtype, shape in _ARRAY.findall(result)
    ]
    if started and kind != "all-reduce":  # the type lists inputs beside outputs
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _itemsize(dtype: str) -> int:
    return 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
