"""Engines with a host tier: the tokens are the references' whatever was evicted and read in again."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.attention_config import Latent
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.planning.sizes import serving_config
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import Request
from orca_jax.scheduling.host_tier import HostTier
from orca_jax.sharding.partition import split_model
from tests.device.engine.test_selected_keys import MODEL as SELECTED_KEYS
from tests.device.engine.test_shared_keys import MODEL as SHARED_KEYS
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.any_model import VOCABULARY
from tests.device.model.drawn_weights import drawn
from tests.device.model.latent_models import dense, latent_model
from tests.gpt_config import gpt_config

N_POSITIONS, BUCKETS = 40, (4, 16)
# Slots for two requests of three, and places for the blocks of several.
SERVING = ServingConfig(
    max_batch_size=3,
    n_slots=80,
    block_size=4,
    max_batch_tokens=16,
    n_host_blocks=30,
    scheduling=SchedulingConfig(prefill_tokens=8),
)
GPT = gpt_config(
    vocab_size=VOCABULARY + 1, n_positions=N_POSITIONS, hidden_size=32, n_layers=2, n_heads=4, ffn_size=40
)
MODELS: dict[str, ModelConfig] = {
    "gpt": GPT,
    "int8": GPT.with_kv_code("int8"),
    "shared keys and windows": SHARED_KEYS,
    "latent": latent_model(Latent(rank=8, rotary_size=4, plain_size=6, value_size=5), 4, [dense()] * 2),
    "selected keys": SELECTED_KEYS,
}
MARGIN = {"int8": 0.1}


@cache
def playing(name: str, split: int) -> Callable[[list[Request]], Harness]:
    """Plays requests on engines with the same programs: `split` stages of `split` devices."""
    model = MODELS[name]
    parallel = ParallelConfig(pipeline_parallel=split, tensor_parallel=split)
    parts, parameters = split_model(model, jax.devices(), parallel), drawn(model, 3)
    first = harness(model, parameters, SERVING, buckets=BUCKETS, parts=parts)
    workers = first.scheduler.engine._workers.workers  # pyright: ignore[reportAttributeAccessIssue]

    def play(asked: list[Request]) -> Harness:
        ran = harness(model, {}, SERVING, buckets=BUCKETS, parts=parts, workers=workers)
        ran.run(asked, [3 * i for i in range(len(asked))])
        reference = GreedyReference(model, parameters)
        n_sure = sum(reference.sure(request, MARGIN.get(name, 1e-4)) for request in asked)
        assert n_sure > 0
        return ran

    return play


def tier_of(ran: Harness) -> HostTier:
    assert ran.kv.host is not None
    return ran.kv.host


def conversations(n_turns: int = 3) -> list[Request]:
    """Turns of four conversations in turn, each a longer beginning of the same text."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCABULARY, 40).tolist() for _ in range(4)]
    return [
        greedy_request(f"{turn} {i}", text[: 13 + 8 * turn], 4)
        for turn in range(n_turns)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gpt", 1),
        pytest.param("gpt", 2, marks=pytest.mark.matrix),
        *(pytest.param(name, 1, marks=pytest.mark.matrix) for name in MODELS if name != "gpt"),
    ],
)
def test_conversations_read_their_beginnings_in_and_go_on_as_the_reference(name: str, split: int) -> None:
    asked = conversations()
    tier = tier_of(playing(name, split)(asked))
    assert tier.n_stored > 20 and tier.n_read > 10 and len(tier) <= SERVING.n_host_blocks
    assert sum(request.n_cached for request in asked) > 4 * tier.n_read


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 9)), min_size=4, max_size=14))
def test_tokens_are_the_references_under_random_schedules(drawn_: list[tuple[int, int, int]]) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCABULARY, 40).tolist() for _ in range(4)]
    playing("gpt", 1)(
        [greedy_request(str(i), texts[of][:n], n_output) for i, (of, n, n_output) in enumerate(drawn_)]
    )


def test_its_size_is_in_bytes_of_all_stages() -> None:
    model = PRESETS["gpt2"]
    rooms = [
        StageRoom(layers=layers, n_devices=1, itemsize=4, attention="static", free=None, modest=1 << 31)
        for layers in (range(6), range(6, 12))
    ]
    block = 16 * 12 * 2 * 768 * 4
    sizes = Sizes(kv_host_bytes=5 * block + block - 1)
    assert serving_config(model, sizes, rooms).n_host_blocks == 5
    assert serving_config(model, Sizes(), rooms).n_host_blocks == 0
    with pytest.raises(ConfigError, match=f"kv_host_bytes is 9, and one block .* takes {block} bytes"):
        serving_config(model, replace(sizes, kv_host_bytes=9), rooms)


def test_a_model_whose_blocks_do_not_say_everything_is_refused() -> None:
    room = StageRoom(layers=range(1), n_devices=1, itemsize=4, attention="static", free=None, modest=1 << 34)
    with pytest.raises(ConfigError, match=r"kv_host_bytes is 1073741824, and .*an encoder.* leave it out"):
        serving_config(PRESETS["t5-small"], Sizes(kv_host_bytes=1 << 30), [room])
