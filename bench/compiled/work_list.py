"""Measures the balance of the kernel's work list over a GPU's cores, and the host's time to build it.

    python -m bench.compiled.work_list [--cores 132] [--block-size 16] [--window N]

Balance is the keys of the average core over those of the busiest core: 1 is perfect. Needs only numpy.
"""

import argparse
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from orca_jax.pallas.work_list.balance import CORE
from orca_jax.pallas.work_list.bounds import STEP, Plan
from orca_jax.pallas.work_list.work_items import ITEM, MERGE, work_items

Rows = list[tuple[int, int]]  # input tokens and keys of each


def _between(n: int) -> Rows:
    return [(1, int(k)) for k in np.random.default_rng(0).integers(100, 2048, n)]


BATCHES: dict[str, Rows] = {
    "32 rows of 2k": [(1, 2048)] * 32,
    "8 rows of 2k": [(1, 2048)] * 8,
    "a row of 32k": [(1, 32768)],
    "32 rows of 100 to 2048": _between(32),
    "a row of 32k, 31 of 512": [(1, 32768)] + [(1, 512)] * 31,
    "a prompt of 2k": [(2048, 2048)],
    "a prompt of 2k, 31 rows of 1k": [(2048, 2048)] + [(1, 1024)] * 31,
}
MANY: dict[str, Rows] = {
    "256 rows of 100 to 2048": _between(256),
    "250 rows of 100 to 2048, 6 prompts": _between(250) + [(200, 1000)] * 6,
}
HEADS = {"40/40": (40, 1), "32/8": (8, 4), "8/1": (1, 8)}  # key/value heads, query heads of each


class Found(NamedTuple):
    """An item of a core's list."""

    core: int
    tile: bool
    record: tuple[int, ...]
    head: int
    begin: int
    end: int
    part: int  # -1: not split


def items(work: np.ndarray, plan: Plan) -> Iterator[Found]:
    """Every core's items, as the kernel reads them."""
    for core in range(plan.n_cores):
        for tile, its, first, n_heads in (
            (True, work[core], plan.first_tile, plan.n_tile_heads),
            (False, work[plan.n_cores + core], plan.first_entry, plan.n_kv_heads),
        ):
            for i in range(its[CORE.n]):
                index = its[CORE.back if i % 2 else CORE.first] + i * its[CORE.stride]
                record, head = work[first + index // n_heads], int(index % n_heads)
                begin, end = record[ITEM.begin], record[ITEM.end]
                part = -1 if record[ITEM.part] < 0 else record[ITEM.part] * n_heads + head
                if i == 0:
                    begin += its[CORE.begin]
                if i == its[CORE.n] - 1:
                    end = min(end, record[ITEM.begin] + its[CORE.end])
                if (begin, end) != (record[ITEM.begin], record[ITEM.end]):
                    part = its[CORE.part] + (i > 0)
                yield Found(core, tile, tuple(map(int, record)), head, int(begin), int(end), int(part))


def lengths(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """row_start [R + 1] and kv_length [R]."""
    inputs = [n for n, _ in rows]
    return np.cumsum([0, *inputs], dtype=np.int32), np.array([n for _, n in rows], np.int32)


def balance(rows: Rows, plan: Plan) -> float:
    """Keys of the average core over keys of the busiest core."""
    load = np.zeros(plan.n_cores)
    for item in items(work_items(*lengths(rows), plan), plan):
        size = STEP if item.tile else plan.granule
        load[item.core] += -(-(item.end - item.begin) // size) * size
    total = 0
    for n, keys in rows:
        if n == 1:
            total += (keys - _first_key(keys - 1, plan)) * plan.n_kv_heads
        else:
            size = plan.tile_tokens
            spans = [
                min(keys, keys - n + first + size) - _first_key(keys - n + first, plan)
                for first in range(0, n, size)
            ]
            total += sum(-(-span // STEP) * STEP for span in spans) * plan.n_tile_heads
    return total / plan.n_cores / load.max()


def _first_key(position: int, plan: Plan) -> int:
    return 0 if plan.window is None else max(0, position - plan.window + 1) // plan.granule * plan.granule


def host_seconds(rows: Rows, plan: Plan, n: int = 300) -> float:
    """The minimum of `n` calls."""
    row_start, kv_length = lengths(rows)
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        work_items(row_start, kv_length, plan)
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    """Print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.work_list", description=__doc__)
    parser.add_argument("--cores", type=int, default=132)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=None, help="keys that a query sees; default: all")
    flags = parser.parse_args()
    table = Table(
        title=f"{flags.cores} cores, blocks of {flags.block_size}: balance, merges, host time in us"
    )
    table.add_column("batch")
    for heads in HEADS:
        table.add_column(f"{heads} heads", justify="right")
    results = []
    for name, rows in (BATCHES | MANY).items():
        cells = []
        for heads, (n_kv_heads, group) in HEADS.items():
            row_start, kv_length = lengths(rows)
            sizes = (int(row_start[-1]), len(rows), n_kv_heads, group, flags.block_size, flags.cores)
            plan = Plan(*sizes, window=flags.window)
            work = work_items(row_start, kv_length, plan)
            merges = int((work[plan.first_merge :, MERGE.token] < plan.n_tokens).sum())
            even, seconds = balance(rows, plan), host_seconds(rows, plan)
            cells.append(f"{even:.2f}, {merges}, {seconds * 1e6:.0f}")
            results.append([name, heads, even, merges, seconds])
        table.add_row(name, *cells)
    Console(width=110).print(table)
    print(json.dumps({"benchmark": "work_list", "cores": flags.cores, "batches": results}))


if __name__ == "__main__":
    main()
