"""Reads a Mosaic GPU kernel's loops, copies and TMA descriptors from the compilers' dumps."""

import re
from dataclasses import dataclass
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?) *;")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_LOCAL = re.compile(r"\b(STL|LDL)\b")
_CLAMPED = re.compile(r"\bmin\.u64 \t?(%rd\d+), %rd\d+, (\d+);")
_NARROWED = re.compile(r"\bcvt\.u32\.u64 \t?(%r\d+), (%rd\d+);")
_PLAIN_COPY = re.compile(r"cp\.async\.bulk\.\S+ \[%\w+\], \[%\w+\], (%r\d+)")
_DESCRIPTOR = re.compile(
    r"call void @mosaic_gpu_init_tma_desc\(ptr \S+, ptr \S+, i64 (\d+), i64 (\d+), .*i64 (\d+), ptr"
)
_STORED = re.compile(r"store i64 (\d+), ptr")
_ITEM_SIZES = {2: 4, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2}  # bytes, by Mosaic's number of the element type


class KeyLoop(NamedTuple):
    """A loop with matrix instructions."""

    n_instructions: int
    n_spills: int  # instructions that store or load a spilled register


def key_loops(sass: str) -> list[KeyLoop]:
    """The innermost loops with matrix instructions in machine code; none if there is no machine code.

    A loop is the range from a backward branch's target to the branch, and an instruction belongs to the
    shortest around it: failed waits branch back from the end of the code, over ranges that are not key loops.
    """
    place = dict[str, int]()
    code = list[str]()
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            place[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(line):
            code.append(instruction[1])
    jumps = [(place[b[1]], i) for i, text in enumerate(code) if (b := _BRANCH.search(text)) and b[1] in place]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    products = [i for i, text in enumerate(code) if "HGMMA" in text]
    around = ([loop for loop in loops if loop[0] <= i <= loop[1]] for i in products)
    ranges = {min(candidates, key=lambda loop: loop[1] - loop[0]) for candidates in around if candidates}
    # A loop around another is that of the items, with a slot's work outside of the loops over slots.
    ranges = {
        outer
        for outer in ranges
        if not any(outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1] for inner in ranges)
    }
    return [
        KeyLoop(end + 1 - begin, sum(_LOCAL.search(text) is not None for text in code[begin : end + 1]))
        for begin, end in sorted(ranges)
    ]


def plain_copies(ptx: str) -> list[int]:
    """Bytes of each copy without rows and columns, which is clamped only at its array's end."""
    clamped = {m[1]: int(m[2]) for m in _CLAMPED.finditer(ptx)}
    size = {m[1]: clamped[m[2]] for m in _NARROWED.finditer(ptx) if m[2] in clamped}
    return [size[m[1]] for m in _PLAIN_COPY.finditer(ptx)]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The arguments of `cuTensorMapEncodeTiled`; outermost dimension first, as in Mosaic."""

    item_size: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # items
    box: tuple[int, ...]
    swizzle: int  # bytes; 16: none

    def broken_rules(self) -> list[str]:
        """The rules of the driver's documentation that it breaks."""
        inner = self.box[-1] * self.item_size
        outer = [stride * self.item_size for stride in self.strides[:-1]]
        rules = {
            "1 to 5 dimensions": 1 <= len(self.sizes) <= 5,
            "the innermost stride is one item": self.strides[-1] == 1,
            "strides are multiples of 16 bytes below 2**40": all(x % 16 == 0 and x < 1 << 40 for x in outer),
            "dimensions are 1 to 2**32": all(1 <= x <= 1 << 32 for x in self.sizes),
            "a box is 1 to 256 items long": all(1 <= x <= 256 for x in self.box),
            "a box's rows are multiples of 16 bytes": inner % 16 == 0,
            "a box's rows are no longer than the swizzle": self.swizzle == 16 or inner <= self.swizzle,
        }
        return [rule for rule, holds in rules.items() if not holds]


def descriptors(host_llvm: str) -> list[Descriptor]:
    """The TMA descriptors that a kernel's host code makes from constants."""
    made, stored = list[Descriptor](), list[int]()
    for line in host_llvm.splitlines():
        if constant := _STORED.search(line):
            stored.append(int(constant[1]))
        elif call := _DESCRIPTOR.search(line):
            element, rank, swizzle = map(int, call.groups())
            sizes, strides, box = (tuple(stored[i * rank :][:rank]) for i in range(3))
            assert len(stored) == 3 * rank, f"{rank} dimensions, and {len(stored)} constants: {stored}"
            made.append(Descriptor(_ITEM_SIZES[element], sizes, strides, box, swizzle))
            stored = []
    return made
