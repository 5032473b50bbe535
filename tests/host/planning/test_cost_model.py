import pytest

from orca_jax.families.parameters import stage_bytes
from orca_jax.planning.cost_model import (
    Device,
    IterationShape,
    Operation,
    floor,
    operations,
    parameter_count,
)
from orca_jax.planning.stage_memory import slot_bytes
from tests.gpt_config import changed_config, gpt_config

SMALL = gpt_config(vocab_size=10, n_positions=8, hidden_size=4, n_layers=2, n_heads=2, ffn_size=16)
GPT2 = gpt_config(vocab_size=50257, n_positions=1024, hidden_size=768, n_layers=12, n_heads=12, ffn_size=3072)


def test_a_mixed_iteration_worked_by_hand():
    # One increment (context of 3 tokens) and one initiation of 2 tokens: T = 3, R = 2, H = 4, F = 16, V = 10.
    shape = IterationShape(input_lengths=[1, 2], kv_lengths=[3, 2])
    layer = [
        Operation("linear", 4 * (4 * 12 + 12 + 3 * (4 + 12)), 2 * 3 * 4 * 12),  # qkv
        # Written 3 tokens, read 3 + 2, a key and a value of 4 elements of 2 bytes each; queries and results.
        # Keys seen: 3 by the increment's query; 1 and 2 by the initiation's.
        Operation("attention", (3 + 5) * 2 * 4 * 2 + 2 * 3 * 4 * 4, 4 * 4 * (3 + 1 + 2)),
        Operation("linear", 4 * (4 * 4 + 4 + 3 * (4 + 4)), 2 * 3 * 4 * 4),  # out
        Operation("linear", 4 * (4 * 16 + 16 + 3 * (4 + 16)), 2 * 3 * 4 * 16),  # up
        Operation("linear", 4 * (16 * 4 + 4 + 3 * (16 + 4)), 2 * 3 * 16 * 4),  # down
    ]
    # The last layer has only the 2 requests' last tokens from its attention on; they see 3 and 2 keys.
    last = [
        layer[0],
        Operation("attention", (3 + 5) * 2 * 4 * 2 + 2 * 2 * 4 * 4, 4 * 4 * (3 + 2)),
        Operation("linear", 4 * (4 * 4 + 4 + 2 * (4 + 4)), 2 * 2 * 4 * 4),  # out
        Operation("linear", 4 * (4 * 16 + 16 + 2 * (4 + 16)), 2 * 2 * 4 * 16),  # up
        Operation("linear", 4 * (16 * 4 + 4 + 2 * (16 + 4)), 2 * 2 * 16 * 4),  # down
    ]
    expected = [
        Operation("embed", 4 * 3 * (4 + 4 + 4), 3 * 4),
        *layer,
        *last,
        Operation("head", 4 * (10 * 4 + 2 * 4) + 4 * 2 * 10, 2 * 2 * 4 * 10),
        Operation("sampler", 4 * 2 * 10, 2 * 10),
    ]
    assert operations(SMALL, shape, weight_bytes=4, kv_bytes=2) == expected
    assert operations(SMALL, shape.sums(), weight_bytes=4, kv_bytes=2) == expected


def test_keys_seen_equal_a_count_query_by_query():
    lengths = [(1, 1), (1, 9), (4, 4), (3, 8)]
    shape = IterationShape(*(list(column) for column in zip(*lengths, strict=True)))
    seen = sum(k - q + 1 + i for q, k in lengths for i in range(q))
    attention = operations(SMALL, shape, weight_bytes=4, kv_bytes=4)[2]
    assert attention.kind == "attention" and attention.n_flops == 4 * 4 * seen


def test_projections_stand_on_both_sides_of_the_layers():
    model = gpt_config(
        vocab_size=10,
        n_positions=8,
        hidden_size=4,
        embedding_size=2,
        n_layers=1,
        n_heads=2,
        ffn_size=16,
        vocab_multiple=8,
    )
    result = operations(model, IterationShape([1], [1]), weight_bytes=2, kv_bytes=2)
    assert result[0] == Operation("embed", 2 * (2 + 4 + 4), 4)
    assert result[1] == Operation("linear", 2 * (2 * 4 + 2 + 4), 2 * 2 * 4)
    assert result[-3] == Operation("linear", 2 * (4 * 2 + 4 + 2), 2 * 4 * 2)
    assert result[-2] == Operation("head", 2 * (16 * 2 + 2) + 4 * 16, 2 * 2 * 16)  # 10 ids padded to 16
    assert parameter_count(model) == 16 * 2 + 8 * 4 + 2 * 4 * 2 + (12 * 16 + 9 * 4 + 16) + 8


def test_floor_takes_the_larger_of_both_for_each_operation():
    device = Device(bandwidth=10.0, matrix_rate=100.0)
    bound_by_memory = Operation("head", n_bytes=50, n_flops=100)
    bound_by_arithmetic = Operation("linear", n_bytes=10, n_flops=300)
    assert floor([bound_by_memory], device) == 5.0
    assert floor([bound_by_arithmetic], device) == 3.0
    assert floor([bound_by_memory, bound_by_arithmetic], device) == 8.0
    assert floor([], device) == 0.0


def test_gpt2_has_124_million_parameters():
    assert parameter_count(GPT2) == 124_439_808
    assert stage_bytes(GPT2, range(GPT2.n_layers), 1, 4) == 497_759_232
    assert slot_bytes(GPT2, range(GPT2.n_layers), 1, 4) == 12 * 2 * 768 * 4


def test_each_option_counts_its_own_parameters():
    def changed(**options):
        return parameter_count(changed_config(SMALL, **options)) - parameter_count(SMALL)

    assert changed(use_bias=False) == -2 * (12 + 4 + 16 + 4)
    assert changed(tie_embeddings=False) == 10 * 4
    assert changed(final_norm=False) == -8
    assert changed(position_offset=2) == 2 * 4
    assert changed(vocab_multiple=64) == 54 * 4


def test_an_increment_reads_every_weight_but_the_position_table_once():
    n_bytes = sum(op.n_bytes for op in operations(GPT2, IterationShape([1], [1]), weight_bytes=4, kv_bytes=4))
    weights = stage_bytes(GPT2, range(GPT2.n_layers), 1, 4) - 4 * 1024 * 768
    assert weights * 0.999 < n_bytes < weights * 1.01


def test_a_shape_that_cannot_be_is_refused():
    for lengths in (([2], [1]), ([0], [1])):
        with pytest.raises(AssertionError, match="input tokens"):
            IterationShape(*lengths)
    with pytest.raises(ValueError, match="shorter"):
        IterationShape([1, 1], [1])
