"""The static sizes of one compiled split-attention kernel, and which models it supports.

Q is the number of query rows in a warp group's tile, the height of Hopper's matrix instruction. C is the
number of keys in a slot of the ring in shared memory.
"""

from dataclasses import dataclass

from orca_jax.pallas.work_list.bounds import Plan

Q = 64
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
_SHARED_BYTES = 226 * 1024  # for tiles and ring; Hopper gives a block 227 KiB, and the barriers need some


def unsupported(
    head_size: int, block_size: int, dtype_name: str, n_heads: int, n_kv_heads: int
) -> str | None:
    """Why the kernel cannot run a model of these sizes, as a clause for a sentence; None if it can."""
    if head_size not in HEAD_SIZES:
        return f"its head size is {head_size}; the kernel has {_listed(HEAD_SIZES)}"
    if block_size not in BLOCK_SIZES:
        return f"its blocks have {block_size} slots; the kernel has {_listed(BLOCK_SIZES)}"
    if dtype_name not in DTYPES:
        return f"its K/V cache is {dtype_name}; the kernel has {_listed(DTYPES)}"
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        return f"its {n_heads} heads are not a multiple of its {n_kv_heads} key/value heads"
    if n_heads // n_kv_heads > Q:
        return (
            f"each of its key/value heads has {n_heads // n_kv_heads} query heads; the kernel packs up to {Q}"
        )
    return None


def _listed(allowed: tuple[object, ...]) -> str:
    return ", ".join(map(str, allowed))


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The static sizes of one compiled kernel. The window is the plan's."""

    n_tokens: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    soft_cap: float | None
    plan: Plan
    interpret: bool

    @property
    def group(self) -> int:
        """G: query heads of a key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def padded_group(self) -> int:
        """G rounded up to a multiple of 8: copies into shared memory must be multiples of 128 bytes."""
        return -(-self.group // 8) * 8

    @property
    def tokens(self) -> int:
        """Tokens of a warp group's tile, each with `plan.packed` heads."""
        return self.plan.tile_tokens // 2

    @property
    def step(self) -> int:
        """C: keys of a slot, and of a step of the loop over keys. Heads of 256 leave registers for 64."""
        return 128 if self.head_size <= 128 else 64

    @property
    def copied(self) -> int:
        """Keys of one copy: a K/V block or a part of one."""
        return self.plan.granule

    @property
    def aliased(self) -> bool:
        """Whether queries and results share memory. The interpreter cannot alias."""
        return not self.interpret

    @property
    def n_rounded(self) -> int:
        """Arrays that hold a part: its rounded value and, if 2, what rounding took away.

        A float32 tile would need a buffer of twice the size. Heads of 256 have no registers left for the
        remainder.
        """
        return 2 if self.head_size <= 128 else 1

    @property
    def n_slots(self) -> int:
        """Slots of the ring: as many as fit in shared memory, 8 at most."""
        tiles = 2 * Q * 2 * self.head_size
        return min(
            4 if self.interpret else 8, (_SHARED_BYTES - tiles) // (2 * self.step * self.head_size * 2)
        )


def swizzle_bytes(head_size: int) -> int:
    """The widest swizzle of shared memory that divides a head of 16-bit numbers: 128, 64 or 32 bytes."""
    return next(b for b in (128, 64, 32) if head_size * 2 % b == 0)
