"""The work list: every query sees every key once, split items are merged, and the cores' loads are even."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.compiled.work_list import BATCHES, Rows, balance, items, lengths
from bench.compiled.work_list import HEADS as KERNEL_HEADS
from orca_jax.pallas.work_list.bounds import MOST_TILE_PARTS, STEP, Plan
from orca_jax.pallas.work_list.work_items import ITEM, MERGE, never_cut, work_items

LONGEST = 3000
LONG_ROWS = st.lists(
    st.integers(0, 300).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(n, LONGEST) if n else st.just(0))
    ),
    min_size=1,
    max_size=20,
)
INCREMENTS = st.lists(st.integers(1, LONGEST).map(lambda n: (1, n)), min_size=1, max_size=20)
HEADS = st.sampled_from([(1, 1), (2, 4), (40, 1), (1, 8), (2, 12)])
WINDOW = st.sampled_from([None, 1, 100, 128, 1000])
N_CORES = st.sampled_from([1, 2, 7, 132])


# An even share would want more parts of one row than `merge` reads: with little other work, and with a
# prompt.
FEW_PARTS: Rows = [(1, 30000)] + [(1, 100)] * 127
UNEVEN: Rows = [(1, 30000)] + [(1, 100)] * 120 + [(129, 20000)] * 3


@settings(max_examples=150)
@example(FEW_PARTS, 0, (1, 8), (16, None), 132, False)
@example([*FEW_PARTS[:-1], (2048, 2048)], 0, (1, 8), (16, None), 132, False)
@example(UNEVEN, 0, (1, 8), (16, None), 132, False)
@example(UNEVEN, 0, (1, 8), (64, 1000), 132, False)
@given(
    LONG_ROWS | INCREMENTS,
    st.integers(0, 200),
    HEADS,
    st.tuples(st.sampled_from([16, 128]), WINDOW),
    N_CORES,
    st.booleans(),
)
def test_every_query_sees_every_key_once_and_split_items_are_merged(
    rows: Rows,
    n_padding: int,
    heads: tuple[int, int],
    block_size_and_window: tuple[int, int | None],
    n_cores: int,
    fixed: bool,
) -> None:
    block_size, window = block_size_and_window
    row_start, kv_length = lengths(rows)
    n_tokens = int(row_start[-1]) + n_padding
    if n_tokens == 0:
        return
    plan = Plan(n_tokens, len(rows), *heads, block_size, n_cores, window=window)
    plan = plan.fixed(LONGEST) if fixed else plan

    def first_key(position: int) -> int:
        """The granule of the first key that a query sees."""
        return 0 if window is None else max(0, position - window + 1) // plan.granule * plan.granule

    work = work_items(row_start, kv_length, plan)
    assert work.dtype == np.int32 and work.shape == plan.list_shape and work.shape[1] == 8

    computed = np.zeros((n_tokens, plan.n_heads), int)  # whole results of a token and head
    ranges = defaultdict[tuple[bool, int, int], list[tuple[int, int]]](list)  # keys of a result, by core
    parts = defaultdict[tuple[bool, int, int], set[int]](set)
    queries = dict[tuple[bool, int, int], int]()

    def heads_of(tile: bool, head: int) -> slice:
        """The query heads of an item, numbered k * G + g."""
        n = plan.packed if tile else plan.group
        return slice(head * n, (head + 1) * n)

    for item in items(work, plan):
        row, token, n, position, first, last, _, _ = item.record
        computed[token : token + n, heads_of(item.tile, item.head)] += item.part < 0
        if item.tile:
            assert 1 <= n <= plan.tile_tokens and last == (position + n if token < row_start[-1] else 0)
            assert first == (first_key(position) if token < row_start[-1] else 0)
            assert (item.begin - first) % STEP == 0
            if token < row_start[-1]:
                assert row_start[row] <= token and token + n <= row_start[row + 1]
                assert position == kv_length[row] - (row_start[row + 1] - token)
        else:
            assert n == 1 and row_start[row + 1] - row_start[row] == 1 and token == row_start[row]
            assert position == kv_length[row] - 1
            assert item.begin % plan.granule == 0
        result = (item.tile, token, item.head)
        queries[result] = n
        ranges[result].append((item.begin, item.end))
        if item.part >= 0:
            assert item.part < (plan.n_tile_parts if item.tile else plan.n_parts)
            assert item.part not in parts[result]
            parts[result].add(item.part)

    merges = [(False, m) for m in work[plan.first_merge : plan.first_tile_merge]]
    merges += [(True, m) for m in work[plan.first_tile_merge :]]
    nowhere = [m[MERGE.token] for _, m in merges if m[MERGE.token] >= n_tokens]
    assert len(set(nowhere)) == len(nowhere)
    for tile, merge in merges:
        token, head, n, part, following, stride, n_parts = map(int, merge[:7])
        if token < n_tokens:
            result = (tile, token, head)
            listed = [part, *(following + i * stride for i in range(n_parts - 1))]
            assert set(listed) == parts.pop(result) and len(set(listed)) == n_parts == len(ranges[result])
            assert 2 <= n_parts <= (MOST_TILE_PARTS if tile else plan.most_parts)
            assert n == queries[result]
            computed[token : token + n, heads_of(tile, head)] += 1
    assert not parts, "parts that are not merged"
    for (tile, token, head), found in ranges.items():
        found.sort()
        row = int(np.searchsorted(row_start, token, side="right")) - 1
        begin = end = 0
        if token < row_start[-1]:
            position = int(kv_length[row]) - int(row_start[row + 1]) + token
            begin, end = first_key(position), position + queries[tile, token, head]
        assert [begin, *(end for _, end in found)] == [*(begin for begin, _ in found), end]
    assert (computed == 1).all()


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=20), HEADS, N_CORES, WINDOW, st.data())
def test_with_fixed_positions_a_row_is_split_as_if_alone(
    kv_length: list[int], heads: tuple[int, int], n_cores: int, window: int | None, data: st.DataObject
) -> None:
    n = len(kv_length)
    plan = Plan(n, n, *heads, n_cores=n_cores, window=window).fixed(LONGEST)

    def ranges_of(row: int, keys: list[int]) -> list[tuple[int, int, int]]:
        work = work_items(*lengths([(1, k) for k in keys]), plan)
        return sorted((i.head, i.begin, i.end) for i in items(work, plan) if i.record[ITEM.row] == row)

    row = data.draw(st.integers(0, n - 1))
    others = data.draw(st.lists(st.integers(1, LONGEST), min_size=n, max_size=n))
    others[row] = kv_length[row]
    assert ranges_of(row, others) == ranges_of(row, kv_length)


@settings(max_examples=12)
@example([(300, 2900), (1, 7), (0, 0), (5, 5)], 3, (1, 64), 132, False)
@example([(3, 2900)], 2, (2, 64), 7, True)
@given(LONG_ROWS, st.integers(0, 9), st.sampled_from([(1, 16), (2, 64)]), N_CORES, st.booleans())
def test_by_token_a_prompts_tokens_are_split_as_decodes_of_their_lengths(
    rows: Rows, n_padding: int, heads: tuple[int, int], n_cores: int, fixed: bool
) -> None:
    row_start, kv_length = lengths(rows)
    n = int(row_start[-1])
    if n == 0:
        return
    row = np.repeat(np.arange(len(rows)), np.diff(row_start))
    keys = kv_length[row] - row_start[row + 1] + np.arange(n) + 1

    def found(plan: Plan, row_start: np.ndarray, kv_length: np.ndarray) -> list[tuple[int, ...]]:
        plan = plan.fixed(LONGEST) if fixed else plan
        work = work_items(row_start, kv_length, plan)
        assert work.shape == plan.list_shape
        listed = [(i.core, *i.record[1:7], i.head, i.begin, i.end, i.part) for i in items(work, plan)]
        merges = work[plan.first_merge :]
        return listed + [(-1, *m.tolist()) for m in merges[merges[:, MERGE.token] < plan.n_tokens]]

    by_token = Plan(n, len(rows), *heads, 64, n_cores, by_token=True)
    decodes = Plan(n, n, *heads, 64, n_cores)
    of_decodes = found(decodes, np.arange(n + 1, dtype=np.int32), keys.astype(np.int32))
    assert found(by_token, row_start, kv_length) == of_decodes
    padded = Plan(n + n_padding, len(rows), *heads, 64, n_cores, by_token=True)
    work = items(work_items(row_start, kv_length, padded), padded)
    empty = sorted((int(i.record[ITEM.token]), i.head) for i in work if i.end == i.begin)
    assert empty == [(token, head) for token in range(n, n + n_padding) for head in range(heads[0])]
    assert all(i.record[ITEM.row] == row[i.record[ITEM.token]] for i in work if i.end > i.begin)


@pytest.mark.parametrize("heads", KERNEL_HEADS.values(), ids=KERNEL_HEADS)
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_no_core_has_much_more_than_its_share(rows: Rows, heads: tuple[int, int]) -> None:
    n_tokens = sum(n for n, _ in rows)
    assert balance(rows, Plan(n_tokens, len(rows), *heads)) >= 0.90


@pytest.mark.parametrize("heads", KERNEL_HEADS.values(), ids=KERNEL_HEADS)
@pytest.mark.parametrize("name", [name for name in BATCHES if not name.startswith(("8 rows", "a row"))])
def test_with_a_window_no_core_has_much_more_than_its_share(name: str, heads: tuple[int, int]) -> None:
    rows = BATCHES[name]
    n_tokens = sum(n for n, _ in rows)
    assert balance(rows, Plan(n_tokens, len(rows), *heads, window=1024)) >= 0.90


def n_merges(rows: Rows, plan: Plan) -> int:
    work = work_items(*lengths(rows), plan)
    return int((work[plan.first_merge :, MERGE.token] < plan.n_tokens).sum())


@given(
    st.lists(st.integers(1, 240).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 240))), min_size=1),
    HEADS,
    st.sampled_from([16, 64]),
    N_CORES,
)
def test_nothing_is_split_if_the_kernel_does_not_merge(
    rows: Rows, heads: tuple[int, int], block_size: int, n_cores: int
) -> None:
    plan = Plan(sum(n for n, _ in rows), len(rows), *heads, block_size, n_cores)
    n = max(-(-keys // block_size) for _, keys in rows) * block_size
    assert not (never_cut(n) and n_merges(rows, plan))


def test_a_row_is_split_if_the_kernel_merges() -> None:
    assert n_merges([(1, 320)], Plan(1, 1, 1, 1)) == 1 and not never_cut(320)


def test_no_row_has_more_parts_than_merge_reads() -> None:
    row_start, kv_length = lengths(FEW_PARTS)
    plan = Plan(128, 128, 1, 8)
    load = np.zeros(plan.n_cores)
    for item in items(work_items(row_start, kv_length, plan), plan):
        load[item.core] += item.end - item.begin
    assert load.max() < 1.05 * 30000 / (plan.most_parts - 1)
