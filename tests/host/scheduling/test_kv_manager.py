import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from orca_jax.scheduling.kv_manager import KVManager, round_up


@pytest.mark.parametrize(
    "n_tokens, block_size, rounded", [(1, 16, 16), (15, 16, 16), (16, 16, 16), (17, 16, 32), (7, 1, 7)]
)
def test_round_up(n_tokens, block_size, rounded):
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


class Blocks(RuleBasedStateMachine):
    """Reserve and release at random; the model is what each row was given, as a plain dictionary."""

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


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
