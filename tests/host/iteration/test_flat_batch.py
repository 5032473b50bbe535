from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.iteration.flat_batch import (
    BatchSizes,
    FlatLayout,
    SamplerArrays,
    TokenPrograms,
    batch_sizes,
    flat_batch,
    sampler_for,
)
from orca_jax.iteration.message import BIAS, SAMPLED, ControlMessage, neutral_sampling
from orca_jax.iteration.shape import EngineShape


def sampling_rows(n, **columns):
    rows = neutral_sampling(n)
    for name, values in columns.items():
        rows[name] = values
    return rows


# Figure 4: x1 = x11 x12 x13 x14 and x2 = x21 x22 are in their increment phase (x14 and x22 are their newest
# tokens), x3 = x31 x32 and x4 = x41 x42 x43 in their initiation phase. A token's id is its name.
FIGURE_4 = ControlMessage(
    row=np.array([0, 1, 2, 3], np.int32),
    initiation=np.array([False, False, True, True]),
    token_index=np.array([2, 1, 0, 0], np.int32),  # x15, x23, x33, x44 are sampled
    input_length=np.array([1, 1, 2, 3], np.int32),
    kv_length=np.array([4, 2, 2, 3], np.int32),
    n_prompt=np.zeros(len([4, 2, 2, 3]), np.int32),
    next_token=np.full(len([4, 2, 2, 3]), SAMPLED, np.int32),
    earlier_ids=np.array([], np.int32),
    token_ids=np.array([0, 0, 31, 32, 41, 42, 43], np.int32),
    token_on_device=np.array([True, True, False, False]),
    block_table=np.array([[5, 2, 0], [1, 0, 0], [3, 6, 0], [4, 0, 7]], np.int32),
    bias=np.array([], BIAS),
    sampling=sampling_rows(4, temperature=[0, 0.5, 0, 1], seed=[1, -1, 2**32 + 3, -(2**63)]),
)


def flat_figure_4(bucket=8):
    return flat_batch(FIGURE_4, bucket=bucket, max_bs=5, block_size=2, n_slots=16, n_rows=10)


def test_figure_4_merged():
    flat = flat_figure_4()
    assert (flat.n_tokens, flat.n_rows) == (7, 4)
    assert flat.layout == FlatLayout(n_tokens=8, n_rows=5, max_blocks=3)
    a, s = flat.arrays, SamplerArrays(*flat.arrays.sampler)
    # x1, x2, x3, x3, x4, x4, x4, padding
    assert a.token_ids.tolist() == [0, 0, 31, 32, 41, 42, 43, 0]
    assert a.positions.tolist() == [3, 1, 0, 1, 0, 1, 2, 0]
    # x14 goes to block 2, place 1; x43 to block 0.
    assert a.slot_of_token.tolist() == [5, 3, 6, 7, 8, 9, 0, 16]
    assert a.take_last.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert a.last_row.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert a.row_start.tolist() == [0, 1, 2, 4, 7, 7]
    assert a.kv_length.tolist() == [4, 2, 2, 3, 0]
    assert s.row.tolist() == [0, 1, 2, 3, 10]
    assert a.block_table.tolist() == [[5, 2, 0], [1, 0, 0], [3, 6, 0], [4, 0, 7], [0, 0, 0]]
    assert s.token_index.tolist() == [2, 1, 0, 0, 0]
    assert s.top_k.tolist() == [0, 0, 0, 0, 0]
    assert s.seed_low.tolist() == [1, -1, 3, 0, 0]
    assert s.seed_high.tolist() == [0, -1, 1, -(2**31), 0]
    assert s.temperature.view(np.float32).tolist() == [0, 0.5, 0, 1, 0]
    assert s.top_p.view(np.float32).tolist() == [1, 1, 1, 1, 1]
    assert flat.programs == TokenPrograms("plain")


def test_figure_5_split_and_merged():
    """Linear layers see [7, H]; attention sees [1, H], [1, H], [2, H], [3, H]; then [7, H] again."""
    start = flat_figure_4(bucket=7).arrays.row_start
    hidden = np.arange(7 * 4).reshape(7, 4)
    split = [hidden[start[r] : start[r + 1]] for r in range(4)]
    assert [part.shape for part in split] == [(1, 4), (1, 4), (2, 4), (3, 4)]
    assert split[2].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert np.array_equal(np.concatenate(split), hidden)


@pytest.mark.parametrize(
    "iteration, input_length, kv_length, positions, row_start",
    [
        (1, [2, 2], [2, 2], [0, 1, 0, 1], [0, 2, 4]),  # the paper's [2, 2, H]
        (2, [1, 1], [3, 3], [2, 2], [0, 1, 2]),  # [2, 1, H]
        (3, [1], [4], [3], [0, 1]),  # x2 has left: nothing is computed for it
        (4, [1], [5], [4], [0, 1]),
    ],
)
def test_figure_3_is_laid_out_by_iteration(iteration, input_length, kv_length, positions, row_start):
    n = len(input_length)
    message = ControlMessage(
        row=np.arange(n, dtype=np.int32),
        initiation=np.full(n, iteration == 1),
        token_index=np.full(n, iteration - 1, np.int32),
        input_length=np.array(input_length, np.int32),
        kv_length=np.array(kv_length, np.int32),
        n_prompt=np.zeros(len(kv_length), np.int32),
        next_token=np.full(len(kv_length), SAMPLED, np.int32),
        earlier_ids=np.array([], np.int32),
        token_ids=np.zeros(len(positions), np.int32),
        token_on_device=np.full(n, iteration > 1),
        block_table=np.array([[0, 1], [2, 3]], np.int32)[:n],
        bias=np.array([], BIAS),
        sampling=sampling_rows(n),
    )
    flat = flat_batch(message, bucket=len(positions), max_bs=2, block_size=4, n_slots=16, n_rows=2)
    assert flat.arrays.positions.tolist() == positions
    assert flat.arrays.row_start.tolist()[: n + 1] == row_start
    assert flat.n_tokens == len(positions) and flat.n_rows == n
    assert flat.programs == TokenPrograms()


def test_a_bucket_of_one_has_one_row():
    message = ControlMessage(
        row=np.array([3], np.int32),
        initiation=np.array([False]),
        token_index=np.array([1], np.int32),
        input_length=np.array([1], np.int32),
        kv_length=np.array([2], np.int32),
        n_prompt=np.zeros(len([2]), np.int32),
        next_token=np.full(len([2]), SAMPLED, np.int32),
        earlier_ids=np.array([], np.int32),
        token_ids=np.array([0], np.int32),
        token_on_device=np.array([True]),
        block_table=np.array([[9]], np.int32),
        bias=np.array([], BIAS),
        sampling=sampling_rows(1),
    )
    flat = flat_batch(message, bucket=1, max_bs=32, block_size=16, n_slots=160, n_rows=32)
    assert flat.layout == FlatLayout(1, 1, 1)
    assert flat.arrays.slot_of_token.tolist() == [145]
    assert flat.arrays.last_row.tolist() == [3]


@pytest.mark.parametrize(
    "temperature, top_p, top_k, sampler",
    [
        ([0, 0], [1, 1], [0, 0], "greedy"),
        ([0, 0], [0.5, 1], [3, 0], "greedy"),  # a greedy row has nothing to cut
        ([0, 0.7], [1, 1], [0, 0], "plain"),
        ([0, 0.7], [0.5, 1], [3, 0], "plain"),
        ([0, 0.7], [1, 1], [0, 1], "full"),
        ([0.7, 0], [0.9, 1], [0, 0], "full"),
    ],
)
def test_the_smallest_sampler_that_serves_all(temperature, top_p, top_k, sampler):
    assert sampler_for(sampling_rows(2, temperature=temperature, top_p=top_p, top_k=top_k)) == sampler


class OnlySlicesAndReshape:
    """Has only the operations of an array that are needed; any other raises AttributeError or TypeError."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, words):
        assert type(words) is slice and words.step is None
        return OnlySlicesAndReshape(self.array[words])

    def reshape(self, shape):
        return OnlySlicesAndReshape(self.array.reshape(shape))


@settings(deadline=None)
@given(
    t=st.integers(1, 40),
    max_bs=st.integers(1, 20),
    max_blocks=st.integers(1, 5),
    encoder=st.integers(0, 3),
    states=st.booleans(),
    adapters=st.booleans(),
    max_drafts=st.sampled_from([0, 4]),
)
def test_split_goes_through_the_buffer_in_order_from_one_multiple_of_256_bytes_to_the_next(
    t, max_bs, max_blocks, encoder, states, adapters, max_drafts
):
    layout = FlatLayout(
        *(t, min(t, max_bs), max_blocks, encoder), states=states, adapters=adapters, max_drafts=max_drafts
    )
    buffer = np.arange(layout.size, dtype=np.int32)
    views = layout.split(buffer)
    expected = 0
    n = layout.n_rows
    of_encoder = [n * (encoder > 0), n * encoder]
    of_states = [(n + 1) * states, n * states, n * (max_drafts > 0)]
    assert [view.size for view in views[-6:]] == [*of_encoder, *of_states, t * adapters]
    for view in filter(np.size, views):
        first = int(view.ravel()[0])
        assert first == expected and first * 4 % 256 == 0
        assert view.ravel().tolist() == list(range(first, first + view.size))
        expected = first + next(n for n in range(0, 1 << 20, 64) if n >= view.size)
    assert layout.size == expected  # anything placed after the buffer is aligned too
    assert all(view.base is buffer for view in views)  # those without elements too
    assert tuple(view.shape for view in views) == tuple(layout.shapes)
    for traced, view in zip(layout.split(OnlySlicesAndReshape(buffer)), views, strict=True):
        assert np.array_equal(traced.array, view)


@st.composite
def batches(draw):
    """Random rows, each a few tokens at the end of a context, with everything else drawn as well."""
    block_size = draw(st.integers(1, 5))
    n_rows = draw(st.integers(1, 12))
    rows = draw(st.lists(st.integers(0, n_rows - 1), min_size=1, max_size=n_rows, unique=True))
    n = len(rows)
    input_length, kv_length, on_device = [], [], []
    for _ in rows:
        kv_length.append(draw(st.integers(1, 20)))
        # The whole context, one token, or a piece at its end.
        input_length.append(draw(st.sampled_from([kv_length[-1], 1, draw(st.integers(1, kv_length[-1]))])))
        on_device.append(input_length[-1] == 1 and draw(st.booleans()))
    max_blocks = -(-20 // block_size)
    n_blocks = n_rows * max_blocks
    blocks = draw(st.permutations(range(n_blocks)))
    vocabulary = st.integers(0, 50256)
    words = st.lists(vocabulary, min_size=sum(input_length), max_size=sum(input_length))

    def each(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    message = ControlMessage(
        row=np.array(rows, np.int32),
        initiation=np.array([q == k for q, k in zip(input_length, kv_length, strict=True)]),
        token_index=np.array(each(st.integers(0, 99)), np.int32),
        input_length=np.array(input_length, np.int32),
        kv_length=np.array(kv_length, np.int32),
        n_prompt=np.zeros(len(kv_length), np.int32),
        next_token=np.array(each(st.sampled_from([SAMPLED, 0, 3])), np.int32),
        earlier_ids=np.array([], np.int32),
        token_ids=np.array(draw(words), np.int32),
        token_on_device=np.array(on_device),
        block_table=np.array(blocks, np.int32).reshape(n_rows, max_blocks)[rows],
        bias=np.array([], BIAS),
        sampling=sampling_rows(
            n,
            temperature=each(st.sampled_from([0.0, 0.5, 1.3])),
            top_p=each(st.sampled_from([0.1, 0.9, 1.0])),
            top_k=each(st.integers(0, 9)),
            seed=each(st.integers(-(2**63), 2**63 - 1)),
            min_p=each(st.sampled_from([0.0, 0.1])),
            repetition_penalty=each(st.sampled_from([1.0, 1.5])),
            frequency_penalty=each(st.sampled_from([0.0, -1.5])),
            presence_penalty=each(st.sampled_from([0.0, 0.25])),
            flags=each(st.integers(0, 3)),
            logprobs=each(st.sampled_from([-1, -1, 0, 3])),
        ),
        adapter=np.array(each(st.integers(0, 3)), np.int32) if draw(st.booleans()) else None,
    )
    bucket = sum(input_length) + draw(st.integers(0, 9))
    max_bs = n + draw(st.integers(0, 4))
    sizes = {"bucket": bucket, "max_bs": max_bs, "block_size": block_size, "n_rows": n_rows}
    adapters = message.adapter is not None or draw(st.booleans())
    return message, sizes | {
        "n_slots": n_blocks * block_size,
        "n_states": draw(st.sampled_from([0, n_rows + 3])),
        "adapters": adapters,
    }


def slow_flat_batch(message, *, bucket, max_bs, block_size, n_slots, n_rows, n_states, adapters):
    """The same batch, built one token and one row at a time."""
    tokens, rows, row_start = [], [], [0]
    token_ids = iter(message.token_ids.tolist())
    for r, row in enumerate(message.row.tolist()):
        q, k = int(message.input_length[r]), int(message.kv_length[r])
        on_device = bool(message.token_on_device[r])
        table = message.block_table[r].tolist()
        for position in range(k - q, k):
            tokens.append(
                {
                    "token_ids": next(token_ids),
                    "positions": position,
                    "slot_of_token": table[position // block_size] * block_size + position % block_size,
                    "take_last": int(on_device),
                    "last_row": row if on_device else 0,
                    "adapter_of_token": 0 if message.adapter is None else int(message.adapter[r]),
                }
            )
        row_start.append(len(tokens))
        seed = int(message.sampling["seed"][r]).to_bytes(8, "little", signed=True)
        rows.append(
            {
                "kv_length": k,
                "row": row if message.next_token[r] == SAMPLED else n_rows,
                "known": int(message.next_token[r]),
                "block_table": table,
                "top_k": int(message.sampling["top_k"][r]),
                "token_index": int(message.token_index[r]),
                "seed_low": int.from_bytes(seed[:4], "little", signed=True),
                "seed_high": int.from_bytes(seed[4:], "little", signed=True),
                "temperature": float(message.sampling["temperature"][r]),
                "top_p": float(message.sampling["top_p"][r]),
                "min_p": float(message.sampling["min_p"][r]),
                "repetition": float(message.sampling["repetition_penalty"][r]),
                "frequency": float(message.sampling["frequency_penalty"][r]),
                "presence": float(message.sampling["presence_penalty"][r]),
                "n_top": int(message.sampling["logprobs"][r]),
                "adjusted": (message.sampling["flags"][r] & 1) * (1 if message.initiation[r] else 2),
            }
        )
    nothing = dict.fromkeys(tokens[0], 0) | {"slot_of_token": n_slots}
    no_blocks = [0] * message.block_table.shape[1]
    padding = dict.fromkeys(rows[0], 0) | {"row": n_rows, "known": SAMPLED, "block_table": no_blocks}
    padding |= {"top_p": 1.0, "repetition": 1.0, "n_top": -1}
    n_tokens = len(tokens)
    while len(tokens) < bucket:
        tokens.append(nothing)
    while len(rows) < min(bucket, max_bs):
        rows.append(padding)
        row_start.append(n_tokens)
    columns = {name: [token[name] for token in tokens] for name in nothing}
    columns |= {name: [row[name] for row in rows] for name in padding}
    columns |= {} if adapters else {"adapter_of_token": []}
    without_encoder = {"encoder_length": [], "encoder_table": [[]] * len(rows)}
    n_padding = len(rows) - len(message.row)
    of_states = {
        "state_start": row_start if n_states else [],
        "state_of_row": [*message.row.tolist(), *[n_states] * n_padding] if n_states else [],
        "kept_at": [],
    }
    return columns | {"row_start": row_start} | without_encoder | of_states


REALS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_every_field_against_a_slow_computation(drawn):
    message, sizes = drawn
    flat = flat_batch(message, **sizes)
    expected = slow_flat_batch(message, **sizes)
    parts = flat.arrays._asdict() | SamplerArrays(*flat.arrays.sampler)._asdict()
    del parts["sampler"]
    assert set(parts) == set(expected)
    for name, array in parts.items():
        assert array.dtype == np.int32
        result = array.view(np.float32) if name in REALS else array
        assert result.tolist() == expected[name], name
    rows = message.sampling
    assert flat.programs.adjust == any(flags & 1 for flags in rows["flags"])
    assert flat.programs.allow == any(flags & 2 for flags in rows["flags"])
    assert flat.programs.logprobs == any(n >= 0 for n in rows["logprobs"])
    assert flat.n_tokens == len(message.token_ids) and flat.n_rows == len(message.row)
    assert flat.buffer.shape == (flat.layout.size,)
    for array, again in zip(flat.arrays, flat.layout.split(flat.buffer), strict=True):
        assert np.array_equal(array, again)


def test_neighbouring_rows_of_one_request_are_one_row_to_its_state() -> None:
    """A scored output has a row for each token; the state takes them one after the other."""
    two = replace(FIGURE_4, row=FIGURE_4.row[[0, 0, *range(2, len(FIGURE_4.row))]])
    sizes: dict[str, Any] = {"bucket": 8, "max_bs": 5, "block_size": 2, "n_slots": 16, "n_rows": 10}
    arrays = flat_batch(two, **sizes, n_states=14).arrays
    start = flat_batch(FIGURE_4, **sizes).arrays.row_start.tolist()
    assert arrays.state_start.tolist() == [0, *start[2:], start[-1]]
    assert arrays.state_of_row.tolist() == [*two.row[1:].tolist(), 14, 14]
    kept = replace(two, states_kept=np.array([[0, 12]], np.int32))
    arrays = flat_batch(kept, **sizes, n_states=14, max_drafts=2).arrays
    assert arrays.kept_at.tolist() == [12, 14, 14, 14, 14]
    with pytest.raises(AssertionError, match="no place for states of drafts"):
        flat_batch(kept, **sizes, n_states=14)


def test_a_row_of_the_layout_may_have_more_blocks_than_the_message():
    flat = flat_batch(FIGURE_4, bucket=8, max_bs=5, block_size=2, n_slots=16, n_rows=10, max_blocks=5)
    assert flat.layout == FlatLayout(n_tokens=8, n_rows=5, max_blocks=5)
    rows = [[5, 2, 0], [1, 0, 0], [3, 6, 0], [4, 0, 7], [0, 0, 0]]
    assert flat.arrays.block_table.tolist() == [[*row, 0, 0] for row in rows]
    assert flat.arrays.slot_of_token.tolist() == flat_figure_4().arrays.slot_of_token.tolist()


def test_no_two_batches_share_a_buffer():
    assert not np.shares_memory(flat_figure_4().buffer, flat_figure_4().buffer)


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(AssertionError, match="4 rows, 7 tokens"):
        flat_figure_4(bucket=6)
    with pytest.raises(AssertionError, match="4 rows, 7 tokens"):
        flat_batch(FIGURE_4, bucket=8, max_bs=3, block_size=2, n_slots=16, n_rows=10)


def decode(*kv_lengths: int, n_blocks: int = 8) -> ControlMessage:
    """Rows of one token each, whose tables are those of requests of `n_blocks` blocks."""
    n = len(kv_lengths)
    table = np.arange(n * n_blocks, dtype=np.int32).reshape(n, n_blocks)
    return replace(
        FIGURE_4,
        row=np.arange(n, dtype=np.int32),
        initiation=np.zeros(n, bool),
        input_length=np.ones(n, np.int32),
        kv_length=np.array(kv_lengths, np.int32),
        token_ids=np.arange(n, dtype=np.int32),
        token_on_device=np.zeros(n, bool),
        next_token=np.full(n, SAMPLED, np.int32),
        token_index=np.zeros(n, np.int32),
        block_table=table,
        sampling=FIGURE_4.sampling[np.zeros(n, int)],
    )


SHAPE = EngineShape(
    block_size=4, max_blocks=8, max_rows=5, max_tokens=16, n_rows=10, n_blocks=64, vocab_size=10
)
CONTEXTS = (6, 16, 100, None)  # the third is longer than any request


def test_a_decode_takes_the_shortest_layout_that_holds_its_rows():
    sizes = BatchSizes(SHAPE, (1, 8, 16), CONTEXTS)
    assert sizes.tiers == (2, 4, 8)
    for kv_lengths, n_tokens, blocks in [
        ((8,), 1, 2),
        ((1, 8), 8, 2),
        ((1, 9), 8, 4),
        ((16, 16, 16, 16, 16), 8, 4),
        ((17, 1), 8, 8),
        ((32, 1), 8, 8),
    ]:
        flat = sizes.lay_out(decode(*kv_lengths))
        assert flat.layout == FlatLayout(n_tokens, n_tokens, blocks, one_each=True), kv_lengths
        assert flat.layout in sizes.layouts
        n = len(kv_lengths)
        assert flat.arrays.block_table[:n].tolist() == [[8 * i + j for j in range(blocks)] for i in range(n)]
        assert flat.arrays.kv_length.tolist() == [*kv_lengths, *[0] * (n_tokens - n)]
        slots = [4 * (8 * i + (k - 1) // 4) + (k - 1) % 4 for i, k in enumerate(kv_lengths)]
        assert flat.arrays.slot_of_token.tolist() == slots + [SHAPE.n_slots] * (n_tokens - n)


def test_only_buckets_of_decodes_have_several_layouts():
    sizes = BatchSizes(SHAPE, (1, 8, 16), CONTEXTS)
    mixed = [FlatLayout(1, 1, 8), FlatLayout(8, 5, 8), FlatLayout(16, 5, 8)]
    decodes = [FlatLayout(n, n, tier, one_each=True) for n in (1, 8) for tier in (2, 4, 8)]
    assert sizes.layouts == mixed + decodes
    assert BatchSizes(SHAPE, (1, 8, 16)).layouts == mixed
    assert sizes.lay_out(FIGURE_4).layout == mixed[1]
    assert BatchSizes(SHAPE, (1, 8, 16)).lay_out(decode(5)).layout == mixed[0]
    # Without the longest context, longer rows take the mixed layout.
    short = BatchSizes(SHAPE, (1, 8, 16), (8,))
    assert short.lay_out(decode(8, 8)).layout == FlatLayout(8, 8, 2, one_each=True)
    assert short.lay_out(decode(8, 9)).layout == mixed[1]


def test_a_deterministic_engine_has_no_layout_that_depends_on_lengths():
    shape = replace(SHAPE, deterministic=True)
    sizes = BatchSizes(shape, shape.buckets, CONTEXTS)
    assert sizes.tiers == (8,)
    assert sizes.lay_out(decode(3, 3)).layout == FlatLayout(5, 5, 8, one_each=True)
    prompts = replace(decode(1, 1), initiation=np.ones(2, bool))
    assert sizes.lay_out(prompts).layout == FlatLayout(16, 5, 8)


def test_a_row_of_several_tokens_has_no_place_in_a_decode_layout():
    with pytest.raises(AssertionError, match="4 rows, 7 tokens"):
        flat_batch(FIGURE_4, bucket=8, max_bs=5, block_size=2, n_slots=16, n_rows=10, one_each=True)
    with pytest.raises(AssertionError, match="one token"):
        FlatLayout(8, 5, 3, one_each=True)


def test_only_batches_with_adapters_take_the_layouts_with_adapters() -> None:
    """So a batch without one runs the programs of an engine that has none."""
    with_room = replace(SHAPE, max_adapters=2, adapter_rank=16)
    sizes = batch_sizes(with_room)
    assert [layout for layout in sizes.layouts if not layout.adapters] == batch_sizes(SHAPE).layouts
    assert sizes.lay_out(decode(3, 3)).layout == batch_sizes(SHAPE).lay_out(decode(3, 3)).layout
    adapted = replace(decode(3, 3), adapter=np.array([0, 2], np.int32))
    assert sizes.lay_out(adapted).layout == replace(sizes.lay_out(decode(3, 3)).layout, adapters=True)
    # Bits must not depend on the other rows.
    exact = batch_sizes(replace(with_room, deterministic=True))
    assert all(layout.adapters for layout in exact.layouts)
    assert exact.lay_out(decode(3, 3)).layout == exact.lay_out(adapted).layout
