"""What the kernel benchmark measures: batches of requests, their bytes and operations, and the list of tasks.

Letters as in `orca_jax/model/__init__.py`: R rows (requests), T query tokens, N heads, K key/value heads, D
head size, B tokens of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from orca_jax.cost_model import Device

Section = Literal[
    "ceilings", "correctness", "increments", "initiation", "mixed", "peers", "launches", "torch"
]
SECTIONS: tuple[Section, ...] = (
    "ceilings", "correctness", "increments", "initiation", "mixed", "launches", "peers", "torch",
)  # fmt: skip
Subject = Literal["kernel", "static", "per request", "cudnn", "decode_attention", "paged_attention", "torch"]

ITEM_BYTES = 2  # bfloat16, what is timed
LONGEST = 8192
BLOCK_SIZE = 16  # the engine's, unless it is told otherwise


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's heads: N, K and D."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.n_heads // self.n_kv_heads


HEADS = (Heads("GPT-3 13B", 40, 40, 128), Heads("grouped", 32, 8, 128))


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: heads, and of each row (query tokens, keys); the queries are the last of the keys."""

    heads: Heads
    rows: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Like `GPT-3 13B, 31 x (1 of 1024) + 1 x (512 of 512)`."""
        parts = [f"{self.rows.count(row)} x ({row[0]} of {row[1]})" for row in sorted(set(self.rows))]
        return f"{self.heads.name}, {' + '.join(parts)}"

    @property
    def n_tokens(self) -> int:
        """T."""
        return sum(n for n, _ in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that the batch sees, each once."""
        return 2 * sum(n for _, n in self.rows) * self.heads.n_kv_heads * self.heads.head_size * ITEM_BYTES

    @property
    def n_bytes(self) -> int:
        """Bytes that must move: keys and values, queries in and results out."""
        return self.kv_bytes + 2 * self.n_tokens * self.heads.n_heads * self.heads.head_size * ITEM_BYTES

    @property
    def n_flops(self) -> int:
        """Floating-point operations of both products, over the keys that each query sees and no others."""
        n_seen = sum(n * (end - n) + n * (n + 1) // 2 for n, end in self.rows)
        return 4 * self.heads.n_heads * self.heads.head_size * n_seen

    def floor(self, device: Device) -> float:
        """Seconds below which no kernel can be: bytes over bandwidth or operations over the matrix rate."""
        return max(self.n_bytes / device.bandwidth, self.n_flops / device.matrix_rate)

    @property
    def increments_only(self) -> bool:
        """Has every row one query token?"""
        return all(n == 1 for n, _ in self.rows)

    def parts(self) -> tuple["Case", "Case"]:
        """A mixed batch's initiation-phase rows, and its increment-phase rows."""
        initiations = tuple(row for row in self.rows if row[0] > 1)
        return Case(self.heads, initiations), Case(self.heads, tuple(row for row in self.rows if row[0] == 1))


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the table: a subject at a case, or a whole section's only task."""

    section: Section
    name: str
    subject: Subject | None = None
    case: Case | None = None


def increments(heads: Heads, n_rows: int, context: int) -> Case:
    """`n_rows` requests of `context` tokens, the last of which is new."""
    return Case(heads, ((1, context),) * n_rows)


def initiation(heads: Heads, n_rows: int, length: int) -> Case:
    """`n_rows` prompts of `length` tokens."""
    return Case(heads, ((length, length),) * n_rows)


def mixed(heads: Heads) -> tuple[Case, ...]:
    """One or a few prompts beside many increments."""
    return tuple(
        Case(heads, ((1, context),) * n_rows + ((length, length),) * n_prompts)
        for n_prompts, length, n_rows, context in (
            (1, 512, 31, 1024),
            (1, 2048, 127, 2048),
            (4, 512, 32, 4096),
        )
    )


def timed_tasks(*, quick: bool) -> Iterator[Task]:
    """Our kernel over the whole table, then the peers over a part of it."""

    def at(section: Section, subject: Subject, case: Case) -> Task:
        return Task(section, f"{section}: {subject}, {case.name}", subject, case)

    batches = (1, 32) if quick else (1, 8, 32, 128)
    contexts = (512, LONGEST) if quick else (128, 256, 512, 1024, 2048, 4096, LONGEST)
    lengths = (512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096, LONGEST)
    several = () if quick else ((16, 128), (4, 2048), (8, 1024))
    for heads in HEADS:
        for n_rows in batches:
            for context in contexts:
                yield at("increments", "kernel", increments(heads, n_rows, context))
    for heads in HEADS:
        for n_rows, length in [*((1, n) for n in lengths), *several]:
            yield at("initiation", "kernel", initiation(heads, n_rows, length))
    for heads in HEADS:
        for case in mixed(heads)[: 1 if quick else None]:
            prompts, ones = case.parts()
            measured = len(prompts.rows) == 1 and prompts.n_tokens in lengths  # among the initiations
            for one in (case, ones) if measured else (case, prompts, ones):
                yield at("mixed", "kernel", one)
            yield at("mixed", "per request", case)
    peers: tuple[Subject, ...] = ("static", "decode_attention", "paged_attention")
    for heads in HEADS:
        for n_rows in batches:
            for context in (LONGEST,) if quick else (1024, LONGEST):
                for subject in peers:
                    yield at("peers", subject, increments(heads, n_rows, context))
            if n_rows > 1:
                yield at("peers", "per request", increments(heads, n_rows, 1024))
        for n_rows, length in ((1, 2048),) if quick else ((1, 512), (1, 2048), (1, LONGEST), (8, 1024)):
            for subject in ("static", "cudnn"):
                yield at("peers", subject, initiation(heads, n_rows, length))


def launch_cases() -> tuple[Case, ...]:
    """The batches whose kernels are timed one by one."""
    heads = HEADS[0]
    return (
        increments(heads, 1, LONGEST),
        increments(heads, 32, 1024),
        initiation(heads, 1, 2048),
        mixed(heads)[0],
    )


def torch_cases(*, quick: bool) -> tuple[Case, ...]:
    """The peers' cases, each once: those PyTorch gets."""
    peers = [task.case for task in timed_tasks(quick=quick) if task.section == "peers" and task.case]
    return tuple(dict.fromkeys(peers))
