"""Requests of a model with an encoder: their slots, and which are refused."""

from functools import partial

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError, EmptyPrompt, NotSupported, PromptTooLong, TokenOutOfRange
from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Embedding, Encoder, FeedForward, Layer, ModelConfig
from orca_jax.planning.sizes import engine_shape, serving_config
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import EncoderInputs
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.select import select_rows
from tests.gpt_config import gpt_config

PLAIN = SamplingParams()
DECODER = gpt_config(vocab_size=50, n_positions=20, hidden_size=8, n_layers=1, n_heads=2, ffn_size=8)


def _model(n_positions: int = 30) -> ModelConfig:
    both = Attention(n_heads=2, n_kv_heads=2, head_size=4, causal=False)
    own = Attention(n_heads=2, n_kv_heads=2, head_size=4)
    feed_forward = FeedForward(size=8)
    return ModelConfig(
        vocab_size=50,
        n_positions=20,
        hidden_size=8,
        layers=(Layer(attention=own, feed_forward=feed_forward, cross=both),),
        embedding=Embedding(size=8),
        encoder=Encoder(layers=(Layer(attention=both, feed_forward=feed_forward),), n_positions=n_positions),
        decoder_start_token_id=3,
    )


def _request(n_encoder: int, max_tokens: int = 5, arrival: int = 0) -> Request:
    request = Request(str(arrival), (3,), max_tokens, PLAIN, seed=0, encoder_ids=(7,) * n_encoder)
    request.arrival = arrival
    return request


def test_a_row_begins_with_the_encoder_s_blocks() -> None:
    kv = KVManager(n_blocks=9, block_size=4, n_rows=2, max_blocks_per_row=3, max_encoder_blocks=2)
    row = kv.reserve(5, 2)
    assert kv.block_table[row].tolist() == [0, 1, 2, 3, 0]
    assert (kv.encoder_blocks[row], kv.slots_of[row], kv.n_free_blocks) == (2, 8, 5)
    kv.grow(row, 9)
    assert kv.blocks_of(row).tolist() == [0, 1, 2, 3, 4]
    assert kv.n_released([row]) == kv.release(row) == 5
    assert (kv.encoder_blocks[row], kv.n_free_blocks) == (0, 9)
    with pytest.raises(AssertionError, match="3 fixed blocks, of 2"):
        kv.reserve(5, 3)


def test_algorithm_1_reserves_and_counts_the_encoder_s_tokens() -> None:
    pool = [_request(6, arrival=0), _request(9, arrival=1)]
    select = partial(select_rows, max_bs=4, block_size=4)
    # 8 slots for 5 tokens each; 8 and 12 for the encoder's.
    assert select(pool, 0, n_slots=36) == ([(pool[0], 1), (pool[1], 1)], 36, None)
    assert select(pool, 0, n_slots=35) == ([(pool[0], 1)], 16, (pool[1], "slots"))
    assert len(select(pool, 0, n_slots=36, max_batch_tokens=17)[0]) == 2
    assert len(select(pool, 0, n_slots=36, max_batch_tokens=16)[0]) == 1


def test_the_prompt_is_the_encoder_s_and_the_decoder_begins_with_its_first_token() -> None:
    inputs = EncoderInputs(ServingConfig(n_slots=80, max_batch_tokens=64), _model())
    assert inputs.split([5, 6], None, PLAIN) == ((5, 6), (3,))
    assert inputs.split([5, 6], [8, 9], PLAIN) == ((5, 6), (3, 8, 9))
    assert inputs.split([5, 6], [3, 9], PLAIN) == ((5, 6), (3, 9))
    without = EncoderInputs(ServingConfig(n_slots=80), DECODER)
    assert without.split([5, 6], None, PLAIN) == ((), [5, 6])
    with pytest.raises(NotSupported, match="decoder_prompt is for models with an encoder"):
        without.split([5, 6], [8], PLAIN)


@pytest.mark.parametrize(
    ("config", "most", "source"),
    [
        (ServingConfig(n_slots=80, max_batch_tokens=64), 30, "the encoder has no more positions"),
        (
            ServingConfig(n_slots=48, max_batch_tokens=64),
            16,
            "n_slots are 48, and the decoder's 17 tokens need theirs",
        ),
        (
            ServingConfig(
                n_slots=80,
                max_batch_tokens=22,
                max_batch_size=8,
                scheduling=SchedulingConfig(prefix_caching=False),
            ),
            21,
            "max_batch_tokens, less the decoder's first token",
        ),
        # After a loss an iteration of Algorithm 1 runs the encoder and 16 tokens: more would wait for ever.
        (
            ServingConfig(n_slots=80, max_batch_tokens=22, max_batch_size=8),
            6,
            "max_batch_tokens without chunked_prefill, less the decoder's",
        ),
    ],
)
def test_an_input_that_cannot_be_read_is_refused(config: ServingConfig, most: int, source: str) -> None:
    inputs = EncoderInputs(config, _model())
    inputs.split([5] * most, None, PLAIN)
    with pytest.raises(PromptTooLong, match=f"the encoder can read at most {most}: {source}"):
        inputs.split([5] * (most + 1), None, PLAIN)
    with pytest.raises(EmptyPrompt):
        inputs.split([], None, PLAIN)
    with pytest.raises(TokenOutOfRange):
        inputs.split([50], None, PLAIN)
    with pytest.raises(NotSupported, match="prompt_logprobs are not supported"):
        inputs.split([5], None, SamplingParams(prompt_logprobs=1))


def test_the_sizes_of_an_engine_with_an_encoder() -> None:
    rooms = [StageRoom(layers=range(1), n_devices=1, itemsize=4, attention="static", free=1 << 40)]
    serving = serving_config(_model(n_positions=3000), Sizes(block_size=8), rooms)
    # For each of 64 requests 24 slots of its tokens, and 3,000 of the encoder's.
    assert serving.n_slots == 64 * 3024
    assert serving.max_batch_tokens == 3001 and not serving.scheduling.prefix_caching
    shape = engine_shape(_model(n_positions=3000), serving, n_workers=1)
    assert (shape.max_blocks, shape.max_encoder_blocks) == (3, 375)
    assert engine_shape(DECODER, serving, n_workers=1).max_encoder_blocks == 0
    with pytest.raises(ConfigError, match="prefix_caching is on, and the model has an encoder"):
        serving_config(_model(), Sizes(prefix_caching=True), rooms)
