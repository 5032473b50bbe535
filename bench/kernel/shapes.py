"""The cases of the kernel benchmark: batches of requests, their bytes and operations, and the list of tasks.

Letters as in `orca_jax/model/__init__.py`: R rows (requests), T query tokens, N heads, K key/value heads, D
head size, B tokens of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from orca_jax.planning.cost_model import Device

Section = Literal[
    "ceilings", "correctness", "increments", "sizes", "initiation", "mixed", "peers", "launches", "torch"
]
SECTIONS: tuple[Section, ...] = (
    "ceilings", "correctness", "increments", "sizes", "initiation", "mixed", "launches", "peers", "torch",
)  # fmt: skip
Subject = Literal[
    "kernel", "static", "per request", "cudnn", "cudnn paged", "attention_mgpu", "decode_attention",
    "paged_attention", "torch",
]  # fmt: skip
Scale = Literal["all", "quick", "tiny"]  # a few of each; one of each, the kernel interpreted on a CPU

ITEM_BYTES = 2  # bfloat16, the timed dtype
LONGEST = 8192
BLOCK_SIZE = 16  # the engine's default


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
OTHER_HEADS = (Heads("heads of 80", 32, 32, 80), Heads("heads of 256", 16, 16, 256))  # OPT-2.7B's; Gemma 7B's
TINY = Heads("tiny", 2, 1, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: heads, and of each row (query tokens, keys); the queries are the last of the keys.

    `block_size` is the size of the K/V blocks, if there are any.
    """

    heads: Heads
    rows: tuple[tuple[int, int], ...]
    block_size: int = BLOCK_SIZE

    @property
    def name(self) -> str:
        """The batch's name, such as `GPT-3 13B, 31 x (1 of 1024) + 1 x (512 of 512)`."""
        parts = [f"{self.rows.count(row)} x ({row[0]} of {row[1]})" for row in sorted(set(self.rows))]
        blocks = "" if self.block_size == BLOCK_SIZE else f", B {self.block_size}"
        return f"{self.heads.name}{blocks}, {' + '.join(parts)}"

    @property
    def n_tokens(self) -> int:
        """The number of query tokens, T."""
        return sum(n for n, _ in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that the batch reads, each counted once."""
        return 2 * sum(n for _, n in self.rows) * self.heads.n_kv_heads * self.heads.head_size * ITEM_BYTES

    @property
    def n_bytes(self) -> int:
        """Bytes that must move: keys and values, queries in and results out."""
        return self.kv_bytes + 2 * self.n_tokens * self.heads.n_heads * self.heads.head_size * ITEM_BYTES

    @property
    def n_flops(self) -> int:
        """Floating-point operations of both products, over only the keys that each query sees."""
        n_seen = sum(n * (end - n) + n * (n + 1) // 2 for n, end in self.rows)
        return 4 * self.heads.n_heads * self.heads.head_size * n_seen

    def floor(self, device: Device) -> float:
        """The least possible seconds: bytes over bandwidth or operations over the matrix rate."""
        return max(self.n_bytes / device.bandwidth, self.n_flops / device.matrix_rate)

    @property
    def increments_only(self) -> bool:
        """Whether every row has one query token."""
        return all(n == 1 for n, _ in self.rows)

    def parts(self) -> tuple["Case", "Case"]:
        """The prefill rows and the decode rows of a mixed batch."""
        initiations = tuple(row for row in self.rows if row[0] > 1)
        return Case(self.heads, initiations), Case(self.heads, tuple(row for row in self.rows if row[0] == 1))


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the table: a subject at a case, or the only task of a section."""

    section: Section
    name: str
    subject: Subject | None = None
    case: Case | None = None


def increments(heads: Heads, n_rows: int, context: int, *, block_size: int = BLOCK_SIZE) -> Case:
    """`n_rows` decoding requests of `context` tokens."""
    return Case(heads, ((1, context),) * n_rows, block_size)


def initiation(heads: Heads, n_rows: int, length: int) -> Case:
    """`n_rows` prompts of `length` tokens."""
    return Case(heads, ((length, length),) * n_rows)


def mixed(heads: Heads) -> tuple[Case, ...]:
    """Batches of one or a few prompts and many decodes."""
    return tuple(
        Case(heads, ((1, context),) * n_rows + ((length, length),) * n_prompts)
        for n_prompts, length, n_rows, context in (
            (1, 512, 31, 1024),
            (1, 2048, 127, 2048),
            (4, 512, 32, 4096),
        )
    )


def _at(section: Section, subject: Subject, case: Case) -> Task:
    return Task(section, f"{section}: {subject}, {case.name}", subject, case)


def timed_tasks(scale: Scale) -> Iterator[Task]:
    """Our kernel over the whole table, then the peers over a part of it."""
    if scale == "tiny":
        yield from _tiny_tasks()
        return
    quick = scale == "quick"
    batches = (1, 32) if quick else (1, 8, 32, 128)
    contexts = (512, LONGEST) if quick else (128, 256, 512, 1024, 2048, 4096, LONGEST)
    lengths = (512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096, LONGEST)
    several = () if quick else ((16, 128), (4, 2048), (8, 1024))
    for heads in HEADS:
        for n_rows in batches:
            for context in contexts:
                yield _at("increments", "kernel", increments(heads, n_rows, context))
    for heads in (HEADS[0], *OTHER_HEADS):
        for block_size in (16, 64, 128):
            for n_rows in (32,) if quick else (8, 32):
                for context in (512, 2048):
                    if heads != HEADS[0] or block_size != BLOCK_SIZE:
                        case = increments(heads, n_rows, context, block_size=block_size)
                        yield _at("sizes", "kernel", case)
    for heads in HEADS:
        for n_rows, length in [*((1, n) for n in lengths), *several]:
            yield _at("initiation", "kernel", initiation(heads, n_rows, length))
    for heads in OTHER_HEADS:
        yield _at("initiation", "kernel", initiation(heads, 1, 2048))
    for heads in HEADS:
        for case in mixed(heads)[: 1 if quick else None]:
            prompts, ones = case.parts()
            measured = len(prompts.rows) == 1 and prompts.n_tokens in lengths  # among the initiations
            for one in (case, ones) if measured else (case, prompts, ones):
                yield _at("mixed", "kernel", one)
            yield _at("mixed", "per request", case)
    peers: tuple[Subject, ...] = ("static", "cudnn paged", "decode_attention", "paged_attention")
    for heads in HEADS:
        for n_rows in batches:
            for context in (LONGEST,) if quick else (1024, LONGEST):
                for subject in peers:
                    yield _at("peers", subject, increments(heads, n_rows, context))
            if n_rows > 1:
                yield _at("peers", "per request", increments(heads, n_rows, 1024))
        for n_rows, length in ((1, 2048),) if quick else ((1, 512), (1, 2048), (1, LONGEST), (8, 1024)):
            for subject in ("static", "cudnn", "attention_mgpu"):
                yield _at("peers", subject, initiation(heads, n_rows, length))


def _tiny_tasks() -> Iterator[Task]:
    """One task of each kind, to run every line of the benchmark."""
    prompt, ones = initiation(TINY, 1, 24), increments(TINY, 2, 40)
    both = Case(TINY, (*ones.rows, *prompt.rows))
    yield _at("increments", "kernel", ones)
    yield _at("sizes", "kernel", increments(TINY, 2, 40, block_size=64))
    yield _at("initiation", "kernel", prompt)
    yield _at("mixed", "kernel", both)
    subjects: tuple[Subject, ...] = ("static", "cudnn paged", "decode_attention", "paged_attention")
    for subject in subjects:
        yield _at("peers", subject, ones)
    for subject in ("static", "cudnn", "attention_mgpu"):
        yield _at("peers", subject, prompt)


def launch_cases(scale: Scale) -> tuple[Case, ...]:
    """The batches whose kernels are timed individually."""
    if scale == "tiny":
        return (increments(TINY, 2, 40),)
    heads = HEADS[0]
    return (
        increments(heads, 1, LONGEST),
        increments(heads, 32, 1024),
        initiation(heads, 1, 2048),
        mixed(heads)[0],
    )


def torch_cases(scale: Scale) -> tuple[Case, ...]:
    """PyTorch's cases: those of the peers, without duplicates."""
    peers = [task.case for task in timed_tasks(scale) if task.section == "peers" and task.case]
    return tuple(dict.fromkeys(peers))
