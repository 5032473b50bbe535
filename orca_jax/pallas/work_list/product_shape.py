"""The static sizes of one compiled grouped product, and which products it supports.

Weights are the matrix instruction's first operand and rows its second, whose number may be as small as 8:
with few rows a tile holds little that is not needed.
"""

from dataclasses import dataclass

COLUMNS = 64  # of the result, and so rows of a weight, in a warp group's tile: the height of the instruction
STEP = 64  # elements of a row that are multiplied in one step: 128 bytes, the widest swizzle
ALIGNED = 8  # rows that are swizzled together: copies of tiles begin at a multiple of it
_NARROWEST = 16  # elements of a row in the narrowest swizzle
DTYPES = ("bfloat16", "float16")
_MOST_ROWS = 128
_SHARED_BYTES = 226 * 1024  # Hopper gives a block 227 KiB, and the barriers need some
_MOST_SLOTS = 12


def unsupported(n_out: int, n_in: int, x_dtype: str, weight_dtype: str) -> str | None:
    """Why the kernel cannot compute with weights [out, in] of these sizes, as a clause; None if it can."""
    if x_dtype not in DTYPES or weight_dtype != x_dtype:
        return f"rows are {x_dtype} and weights {weight_dtype}; both must be one of {', '.join(DTYPES)}"
    # A single row is copied without regard to where it ends, so all columns of a warp group must be in it.
    if n_out % COLUMNS or n_in % _NARROWEST or not n_out or not n_in:
        multiples = f"multiples of {COLUMNS} and {_NARROWEST}, and not 0"
        return f"an expert's weight is {n_out} x {n_in}; they must be {multiples}"
    return None


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The static sizes of one compiled kernel: x [N, in], N a multiple of 8, and weight [X, out, in]."""

    n_rows: int
    n_experts: int
    n_out: int
    n_in: int
    n_cores: int
    interpret: bool

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, a power of two: twice as many as an expert has on average, 8 at least.

        A tile that is partly empty costs operations; a second one costs another read of the weight, from the
        cache if not from memory.
        """
        rows = ALIGNED
        while rows < _MOST_ROWS and rows * self.n_experts < 2 * self.n_rows:
            rows *= 2
        return rows

    @property
    def max_tiles(self) -> int:
        """The most tiles of rows that groups of N rows in all can have, each with up to 7 rows before it."""
        hit = min(self.n_rows, self.n_experts)
        return hit + (self.n_rows + (ALIGNED - 2) * hit) // self.tile_rows

    @property
    def column_tiles(self) -> int:
        """Tiles of a result's columns, of which two warp groups take half of each."""
        return -(-self.n_out // (2 * COLUMNS))

    @property
    def swizzled(self) -> int:
        """Elements of a row that are swizzled together: as many as divide the row, up to a step's."""
        return next(n for n in (STEP, STEP // 2, _NARROWEST) if self.n_in % n == 0)

    @property
    def n_steps(self) -> int:
        """Steps of a product; beyond the end of rows, copies fill in zeros."""
        return -(-self.n_in // STEP)

    @property
    def n_slots(self) -> int:
        """Slots of the ring in shared memory, each with a step's part of a weight and of rows."""
        slot = (2 * COLUMNS + self.tile_rows) * STEP * 2
        results = 2 * self.tile_rows * COLUMNS * 2
        return min(3 if self.interpret else _MOST_SLOTS, (_SHARED_BYTES - results) // slot)
