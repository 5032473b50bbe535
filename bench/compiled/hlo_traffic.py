"""Counts what an iteration of a compiled program launches, and the bytes that it reads and writes.

XLA's own cost analysis counts a loop's body once, whatever its trips, and an update in place as a whole
array. Here a loop counts as often as it runs, a slice or a gather inside a fusion reads what it takes, and an
update in place writes what it changes. Each launch reads its operands and writes its results once: what a
cache of the device saves, and what a kernel reads again, is not counted.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=([^\s,]+)")

# Operations without a launch.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier"}
_FREE |= {"partition-id", "replica-id"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice", "scatter"}
_WHOLE = {"dot", "reduce", "convolution", "reduce-window", "sort", "custom-call", "select-and-scatter"}


@dataclass(frozen=True, slots=True)
class Array:
    """An array's dtype and shape, as in `bf16[32,4096]`."""

    text: str

    @property
    def n_elements(self) -> int:
        sizes = self.text.split("[")[1][:-1]
        return math.prod(int(n) for n in sizes.split(",")) if sizes else 1

    @property
    def n_bytes(self) -> float:
        return self.n_elements * _element_bytes(self.text.split("[")[0])


def _element_bytes(dtype: str) -> float:
    if dtype in ("pred", "token", "opaque"):
        return float(dtype == "pred")
    bits = re.search(r"\d+", dtype)
    assert bits is not None, dtype
    return (1 if dtype.startswith("f8") else int(bits[0]) / 8) if not dtype.startswith("c") else 8


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    arrays: tuple[Array, ...]
    kind: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def n_bytes(self) -> float:
        return sum(array.n_bytes for array in self.arrays)

    @property
    def n_elements(self) -> int:
        return sum(array.n_elements for array in self.arrays)

    def called(self) -> str | None:
        match = _CALLED.search(self.attributes)
        return match[1] if match else None


_Computation = dict[str, _Instruction]


@dataclass(slots=True)
class Counts:
    """The launches, trips and bytes of a program in one iteration.

    `trips` counts the trips of all loops; `launches` includes launches in loops. `host_led` loops have
    a trip count that only the device knows; they count as one trip. `stated` counts the custom calls by the
    arrays for which the caller stated what they read.
    """

    launches: float = 0
    trips: float = 0
    host_led: int = 0
    read: float = 0
    written: float = 0
    stated: dict[str, float] = field(default_factory=dict)

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written

    def add(self, other: "Counts", times: float = 1) -> None:
        """Add the counts of `other`, multiplied by `times`."""
        self.launches += times * other.launches
        self.trips += times * other.trips
        self.host_led += other.host_led
        self.read += times * other.read
        self.written += times * other.written
        for text, n in other.stated.items():
            self.stated[text] = self.stated.get(text, 0) + times * n


def counts(text: str, stated: Mapping[str, float] | None = None) -> Counts:
    """Count in the text of a compiled program.

    `stated` says how many bytes a custom call reads of an operand, by dtype and shape: a kernel reads what
    its tables name of a cache or of experts, not the whole array.
    """
    return _Program(text, stated or {}).run("ENTRY")


class _Program:
    def __init__(self, text: str, stated: Mapping[str, float]) -> None:
        self._stated = stated
        self._computations: dict[str, _Computation] = {}
        self._counted: dict[str, Counts] = {}
        current: _Computation = {}
        for line in text.splitlines():
            if begins := _COMPUTATION.match(line):
                current = self._computations["ENTRY" if begins[1] else begins[2]] = {}
            elif match := _INSTRUCTION.match(line):
                operands, attributes = _operands(match[5])
                arrays = tuple(Array(f"{dtype}[{sizes}]") for dtype, sizes in _ARRAY.findall(match[3]))
                made = _Instruction(
                    match[2], arrays, match[4], operands, attributes, is_root=match[1] is not None
                )
                current[made.name] = made

    def run(self, name: str) -> Counts:
        """Count in one computation, run once."""
        if name not in self._counted:
            total = Counts()
            computation = self._computations[name]
            for instruction in computation.values():
                self._add(total, instruction, computation)
            self._counted[name] = total
        return self._counted[name]

    def _add(self, total: Counts, one: _Instruction, within: _Computation) -> None:
        kind = one.kind.removesuffix("-start")
        if one.kind in _FREE or one.kind.endswith(("-done", "-update")):
            return
        if kind == "while":
            known = _TRIPS.search(one.attributes)
            n_trips = int(known[1]) if known else 1
            body = one.called()
            assert body is not None
            total.add(Counts(trips=n_trips, host_led=known is None))
            total.add(self.run(body), n_trips)
        elif kind == "conditional":
            branches = [self.run(branch) for branch in _branches(one.attributes)]
            total.add(max(branches, key=lambda branch: branch.moved))
        elif kind in ("call", "async"):
            called = one.called()
            assert called is not None
            total.add(self.run(called))
        else:
            self._add_launch(total, one, kind, within)

    def _add_launch(self, total: Counts, one: _Instruction, kind: str, within: _Computation) -> None:
        total.launches += 1
        operands = [within[name] for name in one.operands if name in within]
        if kind == "fusion":
            called = one.called()
            assert called is not None
            body = self._computations[called]
            read, written = _of_fusion(body)
            total.read += read
            total.written += written
            for inner in body.values():
                if inner.kind == "custom-call":
                    self._state(total, [body[name] for name in inner.operands if name in body])
        elif kind in _SLICES:
            total.read += one.n_bytes
            total.written += one.n_bytes
        elif kind in _UPDATES:
            update = operands[1 if kind == "dynamic-update-slice" else 2].n_bytes
            total.read += update
            total.written += update
        elif kind == "custom-call":
            known = self._state(total, operands)
            total.read += sum(each.n_bytes for each in operands if each.name not in known)
            total.written += self._results(one)
        else:
            total.read += sum(each.n_bytes for each in operands)
            total.written += one.n_bytes

    def _state(self, total: Counts, operands: Iterable[_Instruction]) -> set[str]:
        """Count the operands whose bytes are stated; returns their names."""
        known: set[str] = set()
        for operand in operands:
            text = operand.arrays[0].text if len(operand.arrays) == 1 else ""
            if text in self._stated:
                known.add(operand.name)
                total.read += self._stated[text]
                total.stated[text] = total.stated.get(text, 0) + 1
        return known

    def _results(self, one: _Instruction) -> float:
        """Bytes that a custom call writes, without a workspace and stated arrays, which change in place."""
        arrays = [array for array in one.arrays if array.text not in self._stated]
        if len(arrays) > 1 and "__cu" in one.attributes and arrays[-1].text.startswith("s8["):
            arrays.pop()
        return sum(array.n_bytes for array in arrays)


def _of_fusion(body: _Computation) -> tuple[float, float]:
    """Bytes that a fused computation reads and writes."""
    wanted: dict[str, float] = {}  # elements of each instruction that others take
    written = 0.0
    (root,) = (one for one in body.values() if one.is_root)
    for result in [body[name] for name in root.operands] if root.kind == "tuple" else [root]:
        update = _update(result, body)
        written += result.n_bytes if update is None else update.n_bytes
        wanted[result.name] = result.n_elements
    read = 0.0
    for one in reversed(body.values()):
        n = min(wanted.get(one.name, 0), one.n_elements)
        if one.kind == "parameter":
            read += n / max(one.n_elements, 1) * one.n_bytes
        if not n:
            continue
        for i, name in enumerate(one.operands):
            if name in body:
                wanted[name] = wanted.get(name, 0) + _taken(one, n, i, body[name])
    return read, written


def _update(one: _Instruction, body: _Computation) -> _Instruction | None:
    """The array that a result writes into an operand in place; None if the result is a new array."""
    while one.kind in ("bitcast", "reshape") and one.operands:
        one = body[one.operands[0]]
    if one.kind in _UPDATES:
        return body[one.operands[1 if one.kind == "dynamic-update-slice" else 2]]
    return None


def _taken(one: _Instruction, n: float, i: int, operand: _Instruction) -> float:
    """Elements of operand `i` that an instruction takes to make `n` of its elements."""
    if one.kind in _UPDATES:
        return 0 if i == 0 else operand.n_elements
    if one.kind in _SLICES:
        return n if i == 0 else operand.n_elements
    if one.kind in _WHOLE or one.kind == "broadcast" or one.kind == "fusion":
        return operand.n_elements
    return min(n, operand.n_elements)


def _operands(rest: str) -> tuple[tuple[str, ...], str]:
    """The names of an instruction's operands, and the text after them."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return tuple(_OPERAND.findall(rest[:i])), rest[i + 1 :]
    raise AssertionError(f"no end of operands: {rest[:80]}")


def _branches(attributes: str) -> list[str]:
    match = _BRANCHES.search(attributes)
    assert match is not None
    names = match[1].split(",") if match[1] else [match[2], match[3]]
    return [name.strip().removeprefix("%") for name in names]
