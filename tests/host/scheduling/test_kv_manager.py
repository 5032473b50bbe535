import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_cache import PrefixCache, chain_hashes, root_hash


def prefixes_of(kv: KVManager) -> PrefixCache:
    assert kv.prefixes is not None
    return kv.prefixes


@pytest.mark.parametrize(
    "n_tokens, block_size, rounded", [(1, 16, 16), (15, 16, 16), (16, 16, 16), (17, 16, 32), (7, 1, 7)]
)
def test_numbers_are_rounded_up_to_whole_blocks(n_tokens, block_size, rounded):
    assert round_up(n_tokens, block_size) == rounded


def test_a_fresh_table_counts_up():
    kv = KVManager(n_blocks=6, block_size=4, n_rows=3, max_blocks_per_row=3)
    assert [kv.reserve(9), kv.reserve(4), kv.reserve(5)] == [0, 1, 2]
    assert kv.block_table.dtype == np.int32
    assert kv.block_table.tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert kv.n_free_blocks == 0 and kv.n_free_rows == 0


def test_what_is_released_can_be_reserved_at_once_and_need_not_be_in_one_piece():
    kv = KVManager(n_blocks=4, block_size=4, n_rows=4, max_blocks_per_row=4)
    first, _, third, _ = (kv.reserve(4) for _ in range(4))
    kv.release(first)
    kv.release(third)
    assert kv.n_free_blocks == 2
    row = kv.reserve(8)
    assert sorted(kv.blocks_of(row).tolist()) == [0, 2]


def test_rows_of_no_request_hold_zeros():
    kv = KVManager(n_blocks=4, block_size=4, n_rows=2, max_blocks_per_row=4)
    kv.reserve(4)
    row = kv.reserve(12)
    kv.release(row)
    assert kv.block_table[row].tolist() == [0, 0, 0, 0]
    assert kv.blocks_of(row).tolist() == []


def test_blocks_of_is_a_view():
    kv = KVManager(n_blocks=4, block_size=4, n_rows=2, max_blocks_per_row=4)
    assert kv.blocks_of(kv.reserve(10)).base is kv.block_table


def test_mistakes_of_the_scheduler_are_caught():
    kv = KVManager(n_blocks=8, block_size=4, n_rows=1, max_blocks_per_row=2)
    for too_many in (9, 33):
        with pytest.raises(AssertionError, match="blocks"):
            kv.reserve(too_many)
    with pytest.raises(AssertionError, match="0 blocks requested"):
        kv.reserve(0)
    for free_row in (0, -1, 1):
        with pytest.raises(AssertionError, match="is not reserved"):
            kv.release(free_row)
    row = kv.reserve(8)
    with pytest.raises(AssertionError, match="no free row"):
        kv.reserve(1)
    kv.release(row)
    with pytest.raises(AssertionError, match="is not reserved"):
        kv.release(row)
    assert kv.n_free_blocks == 8 and kv.n_free_rows == 1  # none of these took or gave anything


def caching(*, n_blocks=6, n_rows=4):
    return KVManager(
        n_blocks=n_blocks, block_size=4, n_rows=n_rows, max_blocks_per_row=n_blocks, prefix_caching=True
    )


def hashes_of(*contents):
    """The hashes of blocks with these contents, in a chain."""
    return chain_hashes(root_hash(), [ord(content) for content in contents], 1)


def publish(kv, row, hashes):
    for block, block_hash in zip(kv.blocks_of(row).tolist(), hashes, strict=False):
        prefixes_of(kv).add(block, block_hash)


def test_a_row_grows_by_blocks():
    kv = KVManager(n_blocks=4, block_size=4, n_rows=2, max_blocks_per_row=3)
    row = kv.reserve(4)
    kv.grow(row, 4)
    assert (kv.blocks_of(row).tolist(), kv.slots_of[row]) == ([0], 4)
    kv.reserve(1)
    kv.grow(row, 5)
    assert (kv.blocks_of(row).tolist(), kv.slots_of[row]) == ([0, 2], 8)
    kv.grow(row, 12)
    assert kv.block_table.tolist() == [[0, 2, 3], [1, 0, 0]]
    with pytest.raises(AssertionError, match="1 blocks requested, 0 free"):
        kv.grow(row, 13)
    kv.release(1)
    with pytest.raises(AssertionError, match="a row has 3"):
        kv.grow(row, 13)
    assert kv.release(row) == 3
    assert (kv.n_free_blocks, kv.n_free_rows) == (4, 2)


def test_blocks_are_shared_and_free_once_no_row_holds_them():
    kv = caching()
    first = kv.reserve(12)
    publish(kv, first, hashes_of("a", "b"))
    found = prefixes_of(kv).find(hashes_of("a", "b", "c"), limit=3)
    assert found == [0, 1]
    assert kv.n_idle(found) == 0
    (second,) = kv.reserve_sharing([(9, found)])
    assert kv.blocks_of(second).tolist() == [0, 1, 3]
    assert kv.n_free_blocks == 2
    assert [kv.n_released(rows) for rows in ([first], [second], [first, second], [])] == [1, 1, 4, 0]
    assert kv.release(first) == 1
    assert (kv.n_free_blocks, kv.n_idle(found), prefixes_of(kv).n_idle) == (3, 0, 0)
    assert kv.release(second) == 3
    assert (kv.n_free_blocks, kv.n_idle(found), prefixes_of(kv).n_idle) == (6, 2, 2)
    assert prefixes_of(kv).find(hashes_of("a", "b"), limit=2) == [0, 1]


def test_the_least_recently_used_blocks_go_first_and_of_a_request_its_last():
    kv = caching()
    for contents in ("ab", "cd"):
        row = kv.reserve(8)
        publish(kv, row, hashes_of(*contents))
        kv.release(row)
    old, new = hashes_of("a", "b"), hashes_of("c", "d")
    (row,) = kv.reserve_sharing([(8, prefixes_of(kv).find(old, limit=2))])
    kv.release(row)  # used again, so it is the newer now
    left = []
    for n_tokens in range(4, 28, 4):
        row = kv.reserve(n_tokens)
        left.append([len(prefixes_of(kv).find(hashes, limit=2)) for hashes in (old, new)])
        kv.release(row)
    assert left == [[2, 2], [2, 2], [2, 1], [2, 0], [1, 0], [0, 0]]
    assert prefixes_of(kv).n_evictions == 4 and len(prefixes_of(kv)) == 0


def test_cached_blocks_are_held_before_any_is_evicted():
    """Even the least recently used block is held when an earlier request of the batch takes new blocks."""
    kv = caching(n_blocks=3)
    for contents in ("a", "bc"):
        row = kv.reserve(4 * len(contents))
        publish(kv, row, hashes_of(*contents))
        kv.release(row)
    found = prefixes_of(kv).find(hashes_of("a"), limit=1)
    first, second = kv.reserve_sharing([(8, []), (4, found)])
    assert kv.blocks_of(second).tolist() == found
    assert sorted([*kv.blocks_of(first), *found]) == [0, 1, 2]


def test_after_forget_nothing_is_found_and_no_block_is_lost():
    kv = caching()
    held, ended = kv.reserve(8), kv.reserve(8)
    publish(kv, held, hashes_of("a", "b"))
    publish(kv, ended, hashes_of("c", "d"))
    kv.release(ended)
    kv.forget()
    assert len(prefixes_of(kv)) == prefixes_of(kv).n_idle == 0
    assert (
        prefixes_of(kv).find(hashes_of("a"), limit=1) == prefixes_of(kv).find(hashes_of("c"), limit=1) == []
    )
    assert kv.n_free_blocks == 4
    kv.release(held)
    assert (kv.n_free_blocks, prefixes_of(kv).n_idle) == (6, 0)
    assert sorted(kv.blocks_of(kv.reserve(24)).tolist()) == list(range(6))
    KVManager(n_blocks=1, block_size=1, n_rows=1, max_blocks_per_row=1).forget()  # without a cache: nothing


class Blocks(RuleBasedStateMachine):
    """Reserves and releases at random; the model is a dictionary of each row's blocks."""

    N_BLOCKS, BLOCK_SIZE, N_ROWS, MAX_BLOCKS = 11, 3, 5, 6
    rows = Bundle("rows")

    def __init__(self):
        super().__init__()
        self.kv = KVManager(
            n_blocks=self.N_BLOCKS,
            block_size=self.BLOCK_SIZE,
            n_rows=self.N_ROWS,
            max_blocks_per_row=self.MAX_BLOCKS,
        )
        self.held = {}

    def n_free(self):
        return self.N_BLOCKS - sum(map(len, self.held.values()))

    @precondition(lambda self: self.n_free() and len(self.held) < self.N_ROWS)
    @rule(target=rows, data=st.data())
    def reserve(self, data):
        most = min(self.n_free(), self.MAX_BLOCKS) * self.BLOCK_SIZE
        max_tokens = data.draw(st.integers(1, most), "max_tokens")
        row = self.kv.reserve(max_tokens)
        assert row not in self.held
        self.held[row] = self.kv.blocks_of(row).tolist()
        assert len(self.held[row]) * self.BLOCK_SIZE == round_up(max_tokens, self.BLOCK_SIZE)
        return row

    @rule(row=consumes(rows))
    def release(self, row):
        self.kv.release(row)
        del self.held[row]

    @invariant()
    def every_block_has_one_holder(self):
        blocks = [block for held in self.held.values() for block in held]
        assert len(blocks) == len(set(blocks))
        assert all(0 <= block < self.N_BLOCKS for block in blocks)

    @invariant()
    def none_is_lost(self):
        assert self.kv.n_free_blocks == self.n_free()
        assert self.kv.n_free_rows == self.N_ROWS - len(self.held)

    @invariant()
    def the_table_matches_the_owners(self):
        for row, line in enumerate(self.kv.block_table.tolist()):
            held = self.held.get(row, [])
            assert line == held + [0] * (self.MAX_BLOCKS - len(held))

    def teardown(self):
        for row in self.held:
            self.kv.release(row)
        free = self.kv.reserve(self.MAX_BLOCKS * self.BLOCK_SIZE)
        rest = self.kv.reserve((self.N_BLOCKS - self.MAX_BLOCKS) * self.BLOCK_SIZE)
        blocks = [*self.kv.blocks_of(free), *self.kv.blocks_of(rest)]
        assert sorted(blocks) == list(range(self.N_BLOCKS))


class SharedBlocks(RuleBasedStateMachine):
    """Plays the prefix cache and growing rows against plain dictionaries and a list of idle blocks.

    Requests begin with blocks of few different contents, so that many share a prefix.
    """

    N_BLOCKS, BLOCK_SIZE, N_ROWS, MAX_BLOCKS = 9, 2, 4, 6
    contents = st.lists(st.sampled_from("ab"), min_size=1, max_size=6)

    def __init__(self):
        super().__init__()
        self.kv = KVManager(
            n_blocks=self.N_BLOCKS,
            block_size=self.BLOCK_SIZE,
            n_rows=self.N_ROWS,
            max_blocks_per_row=self.MAX_BLOCKS,
            prefix_caching=True,
        )
        self.held = {}  # row: its blocks
        self.contents_of = {}  # row: what its first blocks will hold
        self.block_of = {}  # hash: block
        self.idle = []  # least recently used first
        self.n_evictions = 0
        self.n_reserved = [0] * self.N_ROWS

    def users(self, block):
        return sum(block in blocks for blocks in self.held.values())

    def n_free(self):
        return self.N_BLOCKS - len({block for blocks in self.held.values() for block in blocks})

    def allocate(self, row, n):
        """Check that `row` gets `n` blocks, and which blocks are evicted for them."""
        blocks = self.kv.blocks_of(row).tolist()
        had, new = blocks[: len(self.held[row])], blocks[len(self.held[row]) :]
        assert had == self.held[row] and len(blocks) == max(n, len(had))
        n_unused = self.n_free() - len(self.idle)
        evicted, self.idle = (
            self.idle[: max(0, len(new) - n_unused)],
            self.idle[max(0, len(new) - n_unused) :],
        )
        self.n_evictions += len(evicted)
        self.block_of = {key: block for key, block in self.block_of.items() if block not in evicted}
        assert not {*new} & {*self.idle, *self.block_of.values()}, "still in the cache"
        assert not any(self.users(block) for block in new)
        assert {*evicted} <= {*new}
        self.held[row] = blocks

    @precondition(lambda self: self.n_free() and len(self.held) < self.N_ROWS)
    @rule(data=st.data())
    def reserve(self, data):
        n = data.draw(st.integers(1, min(self.n_free(), self.MAX_BLOCKS)), "n")
        row = self.kv.reserve(n * self.BLOCK_SIZE - data.draw(st.booleans()))
        assert row not in self.held
        self.n_reserved[row] += 1
        self.held[row] = []
        self.allocate(row, n)
        self.contents_of[row] = data.draw(self.contents, "contents")

    @precondition(lambda self: self.n_free() and len(self.held) < self.N_ROWS)
    @rule(data=st.data())
    def reserve_sharing(self, data):
        wanted, all_contents = [], []
        n_free, revived = self.n_free(), set()
        for _ in range(data.draw(st.integers(1, self.N_ROWS - len(self.held)), "requests")):
            contents = data.draw(self.contents, "contents")
            limit = data.draw(st.integers(0, len(contents)), "limit")
            hashes = hashes_of(*contents)
            found = prefixes_of(self.kv).find(hashes, limit)
            expected = []
            for block_hash in hashes[:limit]:
                if block_hash not in self.block_of:
                    break
                expected.append(self.block_of[block_hash])
            assert found == expected
            n_idle = len([b for b in found if not self.users(b)])
            assert self.kv.n_idle(found) == n_idle
            most = min(n_free - len({*self.idle} & {*found} - revived), self.MAX_BLOCKS - len(found))
            if most < 0 or most + len(found) == 0:
                continue
            n_new = data.draw(st.integers(0 if found else 1, most), "new")
            n_free -= n_new + len({*self.idle} & {*found} - revived)
            revived |= {*found}
            wanted.append(((len(found) + n_new) * self.BLOCK_SIZE, found))
            all_contents.append(contents)
        rows = self.kv.reserve_sharing(wanted)
        assert len(set(rows)) == len(rows) and not {*rows} & {*self.held}
        for row, (_, found) in zip(rows, wanted, strict=True):
            self.n_reserved[row] += 1
            self.held[row] = list(found)
            self.idle = [block for block in self.idle if block not in found]
        for row, (n_tokens, _), contents in zip(rows, wanted, all_contents, strict=True):
            self.allocate(row, n_tokens // self.BLOCK_SIZE)
            self.contents_of[row] = contents

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data):
        row = data.draw(st.sampled_from(sorted(self.held)), "row")
        most = min(self.MAX_BLOCKS, len(self.held[row]) + self.n_free())
        n_tokens = data.draw(st.integers(1, most * self.BLOCK_SIZE), "n_tokens")
        self.kv.grow(row, n_tokens)
        self.allocate(row, round_up(n_tokens, self.BLOCK_SIZE) // self.BLOCK_SIZE)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data):
        row = data.draw(st.sampled_from(sorted(self.held)), "row")
        n = data.draw(st.integers(1, len(self.held[row])), "blocks")
        published = zip(self.held[row][:n], hashes_of(*self.contents_of[row]), strict=False)
        for block, block_hash in published:
            if block_hash not in self.block_of and block in self.block_of.values():
                return  # it holds something else: a shared block, after contents that this row has not
            prefixes_of(self.kv).add(block, block_hash)
            self.block_of.setdefault(block_hash, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        row = data.draw(st.sampled_from(sorted(self.held)), "row")
        expected = self.kv.n_released([row])
        assert self.kv.release(row) == expected
        blocks = self.held.pop(row)
        freed = [block for block in reversed(blocks) if not self.users(block)]
        assert len(freed) == expected
        self.idle += [block for block in freed if block in self.block_of.values()]

    @rule()
    def forget(self):
        self.kv.forget()
        self.block_of.clear()
        self.idle.clear()

    @rule(data=st.data())
    def ask_what_a_release_frees(self, data):
        rows = data.draw(st.lists(st.sampled_from(range(self.N_ROWS)), unique=True), "rows")
        rows = [row for row in rows if row in self.held]
        kept = {b for row, blocks in self.held.items() if row not in rows for b in blocks}
        assert self.kv.n_released(rows) == len({b for row in rows for b in self.held[row]} - kept)

    @invariant()
    def no_block_is_lost(self):
        assert self.kv.n_free_blocks == self.n_free()
        assert self.kv.n_free_rows == self.N_ROWS - len(self.held)
        assert self.kv.n_idle(range(self.N_BLOCKS)) == self.n_free()
        assert self.kv.n_reserved.tolist() == self.n_reserved

    @invariant()
    def the_cache_matches(self):
        prefixes = prefixes_of(self.kv)
        assert (len(prefixes), prefixes.n_idle) == (len(self.block_of), len(self.idle))
        assert prefixes.n_evictions == self.n_evictions
        for block_hash, block in self.block_of.items():
            assert prefixes.find([block_hash], 1) == [block]

    @invariant()
    def the_table_matches_the_owners(self):
        for row, line in enumerate(self.kv.block_table.tolist()):
            held = self.held.get(row, [])
            assert line == held + [0] * (self.MAX_BLOCKS - len(held))
            assert self.kv.slots_of[row] == len(held) * self.BLOCK_SIZE

    def teardown(self):
        for row in sorted(self.held):
            self.kv.release(row)
        assert self.kv.n_free_blocks == self.N_BLOCKS
        rows = self.kv.reserve_sharing([(self.MAX_BLOCKS * self.BLOCK_SIZE, []), (6, [])])
        blocks = [block for row in rows for block in self.kv.blocks_of(row).tolist()]
        assert sorted(blocks) == list(range(self.N_BLOCKS))


TestSharedBlocks = SharedBlocks.TestCase
TestSharedBlocks.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
