"""Models of attention and recurrent layers: whatever the schedule, the tokens are the reference's."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, Reservation, SchedulingConfig, ServingConfig, Sizes
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.errors import ConfigError, NotSupported
from orca_jax.execution.worker import LocalWorkers
from orca_jax.families.attention_config import Attention
from orca_jax.families.config_json import config_from_json, config_to_json, plain_error
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import GatedDeltaNet, Mamba2, Recurrence, ShortConvolution
from orca_jax.families.rotary import Rotary
from orca_jax.model import reference
from orca_jax.model.transformer import Parameters
from orca_jax.planning.sizes import engine_shape, serving_config
from orca_jax.planning.stage_memory import StageMemory, StageRoom, slot_bytes, state_bytes
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import check_search
from orca_jax.scheduling.restart import run_again
from orca_jax.sharding.partition import split_model
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.any_model import any_model, check
from tests.device.model.drawn_weights import drawn
from tests.random_pieces import RandomPieces

NORM = Norm(kind="rms_norm", eps=1e-5)
ATTENTION = Attention(
    n_heads=4, n_kv_heads=2, head_size=8, qkv_bias=False, out_bias=False, rotary=Rotary(size=8)
)
FEED_FORWARD = FeedForward(size=24, activation="silu", gated=True, bias=False)


def attending() -> Layer:
    return Layer(attention=ATTENTION, feed_forward=FEED_FORWARD, norm=NORM)


def mixing(own: Recurrence) -> Layer:
    return Layer(attention=None, recurrence=own, feed_forward=FEED_FORWARD, norm=NORM)


def convolving(width: int = 3, *, bias: bool = False) -> Layer:
    return mixing(ShortConvolution(channels=20, width=width, bias=bias))


def delta(*, by_key_head: bool) -> Layer:
    return mixing(
        GatedDeltaNet(
            n_key_heads=2, n_value_heads=4, key_size=6, value_size=5, width=4, by_key_head=by_key_head
        )
    )


def mamba(**other: Any) -> Layer:
    sizes: dict[str, Any] = {"n_heads": 6, "head_size": 5, "n_groups": 2, "state_size": 7, "width": 3}
    return mixing(Mamba2(**sizes, conv_bias=not other, bias=bool(other), **other))


def alone(layer: Layer) -> Layer:
    """The same layer without its feed-forward."""
    return replace(layer, feed_forward=None)


def beside(layer: Layer) -> Layer:
    """The same recurrent layer with attention beside its mixer, as in Falcon-H1."""
    return replace(layer, attention=ATTENTION, attention_multiplier=0.7, recurrence_multiplier=1.3)


def feeding(**other: Any) -> Layer:
    """A feed-forward alone."""
    return Layer(attention=None, feed_forward=replace(FEED_FORWARD, **other), norm=NORM)


def hybrid(*layers: Layer) -> ModelConfig:
    return ModelConfig(
        vocab_size=53,
        n_positions=40,
        hidden_size=20,
        layers=layers,
        embedding=Embedding(size=20),
        positions=None,
        final_norm=NORM,
    )


# The last layer is a recurrence, and the last one attends.
RECURRENT_LAST = hybrid(convolving(), attending(), convolving(4, bias=True))
ATTENDING_LAST = hybrid(convolving(), attending())
DELTA = hybrid(
    delta(by_key_head=True), attending().with_attention(output_gate=True), delta(by_key_head=False)
)
MAMBA = hybrid(mamba(), attending(), mamba(least_step=0.6, most_step=0.8))
BOTH_LAST = hybrid(
    beside(mamba(norm=None, multipliers=(0.9, 1.1, 0.8, 1.2, 0.7))),
    beside(mixing(ShortConvolution(channels=20, width=3))).with_feed_forward(
        gate_multiplier=1.4, multiplier=0.6
    ),
)
ONE_PART = hybrid(
    feeding(gated=False, activation="relu2"),
    alone(attending()),
    alone(mamba()),
    feeding(experts=Experts(number=5, top_k=2, scores="sigmoid", shared_size=12, latent_size=14)),
)


@pytest.mark.matrix
@settings(any_model, max_examples=2)
@given(
    model=st.sampled_from([RECURRENT_LAST, ATTENDING_LAST, DELTA, MAMBA, ONE_PART, BOTH_LAST]),
    seed=st.integers(0, 99),
)
def test_the_tokens_are_the_references(model: ModelConfig, seed: int) -> None:
    check(model, seed)


# A layer of each kind, and the last one recurrent; some have one part alone, one has both.
EVERY = hybrid(
    delta(by_key_head=True),
    alone(mamba()),
    alone(attending().with_attention(output_gate=True)),
    feeding(),
    delta(by_key_head=False),
    beside(mamba(least_step=0.6, most_step=0.8, norm_first=True)),
    convolving(4, bias=True),
)
ON_DEMAND = SchedulingConfig(prefix_caching=False)
CHUNKED = ServingConfig(max_batch_size=4, n_slots=4 * 48, max_batch_tokens=11, scheduling=ON_DEMAND)
# Of few slots, so that requests are preempted.
FEW_SLOTS = replace(CHUNKED, n_slots=48, block_size=4, n_snapshots=3)


@pytest.fixture(scope="module")
def weights() -> dict[ModelConfig, Parameters]:
    return {model: drawn(model, 5) for model in (RECURRENT_LAST, EVERY, BOTH_LAST)}


@dataclass(frozen=True)
class Schedule:
    """Prompts' lengths, outputs' lengths and arrivals; and what happens while they run."""

    requests: tuple[tuple[int, int, int], ...]
    overlap: bool = True
    reservation: Reservation = "on-demand"
    pieces: int | None = None  # the seed of prompts' random pieces
    lost_before: int = -1  # the step before which all workers lose what they hold
    snapshot_blocks: int | None = None  # with a prefix cache: the blocks between two snapshots


schedules = st.builds(
    Schedule,
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=9
    ).map(tuple),
    overlap=st.booleans(),
    reservation=st.sampled_from(["full", "on-demand"]),
    pieces=st.none() | st.integers(0, 2**20),
    lost_before=st.integers(-1, 20),
    snapshot_blocks=st.none() | st.integers(1, 3),
)
CROWD = tuple((1 + 7 * i % 30, 9, i) for i in range(9))


@pytest.mark.parametrize(
    ("n_stages", "n_examples"),
    [
        (1, 12),
        pytest.param(1, 400, marks=pytest.mark.long),
        pytest.param(3, 100, marks=pytest.mark.long),
    ],
)
def test_any_schedule_gives_the_references_tokens(
    n_stages: int, n_examples: int, weights: dict[ModelConfig, Parameters]
) -> None:
    """Prompts in pieces at any border, preemption, rows reused by other requests, overlap, lost workers.

    With a prefix cache prompts begin alike, and go on from snapshots of states. Rows and snapshots keep the
    states of earlier examples, which no request may see.
    """
    parts = split_model(EVERY, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    first = harness(EVERY, weights[EVERY], FEW_SLOTS, buckets=(11,), parts=parts)
    workers = local_workers(first).workers
    expected = GreedyReference(EVERY, weights[EVERY])
    seen: Counter[str] = Counter()

    @settings(max_examples=n_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(Schedule(CROWD))
    @example(Schedule(CROWD, pieces=1, lost_before=7))
    @example(Schedule(CROWD, snapshot_blocks=1))
    @example(Schedule(CROWD, snapshot_blocks=2, pieces=2, lost_before=12, overlap=False))
    @given(schedules)
    def tokens_are_the_references(schedule: Schedule) -> None:
        every = schedule.snapshot_blocks
        scheduling = SchedulingConfig(
            prefix_caching=every is not None, snapshot_blocks=every or 1, reservation=schedule.reservation
        )
        serving = replace(FEW_SLOTS, overlap=schedule.overlap, scheduling=scheduling)
        ran = harness(EVERY, {}, serving, buckets=(11,), parts=parts, workers=workers)
        if schedule.pieces is not None:
            ran.scheduler.policy = RandomPieces(ran.scheduler.policy, random.Random(schedule.pieces))

        def before_step(step: int) -> None:
            if step == schedule.lost_before:
                for worker in workers:
                    worker.renew()
                local_workers(ran)._to_do.clear()
                run_again(ran.scheduler)
                seen["lost"] += 1

        rng = np.random.default_rng(len(schedule.requests))
        beginning = rng.integers(0, 53, 30).tolist()

        def prompt(i: int, n_input: int) -> list[int]:
            n_shared = n_input * (i % 3 + 1) // 3 if every else 0
            return beginning[:n_shared] + rng.integers(0, 53, n_input - n_shared).tolist()

        asked = [
            greedy_request(str(i), prompt(i, n_input), n_output)
            for i, (n_input, n_output, _) in enumerate(schedule.requests)
        ]
        ran.run(asked, [arrival for *_, arrival in schedule.requests], before_step)
        seen["preempted"] += ran.scheduler.n_preemptions
        if ran.kv.snapshots is not None:
            seen["used"] += ran.kv.snapshots.n_used
            seen["evicted"] += ran.kv.snapshots.n_evicted
        seen["sure"] += sum(expected.sure(request) for request in asked)

    tokens_are_the_references()
    assert seen["preempted"] > 0 and seen["lost"] > 0 and seen["sure"] > 100, seen
    assert seen["used"] > 3 and seen["evicted"] > 3, seen


def local_workers(ran: Harness) -> LocalWorkers:
    """The workers of an engine in this process."""
    assert isinstance(ran.scheduler.engine, EngineMaster)
    assert isinstance(ran.scheduler.engine._workers, LocalWorkers)
    return ran.scheduler.engine._workers


@pytest.mark.parametrize("model", [RECURRENT_LAST, BOTH_LAST], ids=["recurrent", "both"])
def test_a_prompts_tokens_are_scored_after_a_recurrent_last_layer(
    model: ModelConfig,
    weights: dict[ModelConfig, Parameters],
) -> None:
    """Log-probabilities of a prompt go on from what the mixer made, which must not take a token twice."""
    prompt = [7 * i % 53 for i in range(25)]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=0)
    request = Request("scored", tuple(prompt), len(prompt) + 4, sampling, seed=0)
    harness(model, weights[model], CHUNKED, buckets=(11,)).run([request])
    logits = reference.forward(model, weights[model], jnp.array(prompt))
    wanted = np.asarray(jax.nn.log_softmax(logits))[np.arange(24), prompt[1:]]
    assert request.prompt_logprobs is not None
    found = [record.logprob for record in request.prompt_logprobs]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    GreedyReference(model, weights[model]).sure(request)


def test_what_recurrent_layers_do_not_support_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel is 3, and recurrent layers have convolutions of 20"
    ):
        ATTENDING_LAST.for_devices(3)
    with pytest.raises(ConfigError, match="a model without any attention layer is not supported"):
        hybrid(convolving())
    room = StageRoom(layers=range(2), n_devices=1, itemsize=4, attention="native", free=None, modest=1 << 30)
    with pytest.raises(ConfigError, match=r"prefix_caching is on, .* and snapshot_bytes 7 holds none"):
        serving_config(ATTENDING_LAST, Sizes(prefix_caching=True, snapshot_bytes=7), [room])
    assert not serving_config(ATTENDING_LAST, Sizes(snapshot_bytes=7), [room]).scheduling.prefix_caching
    sampling = SamplingParams(max_tokens=4, use_beam_search=True, n=2, temperature=0)
    sizes = ServingConfig(max_batch_size=4, n_slots=128, block_size=16)
    with pytest.raises(NotSupported, match="use_beam_search is not supported for a model with recurrent"):
        check_search(4, 0, sampling, ATTENDING_LAST, sizes)


def test_snapshots_take_the_bytes_asked_for_or_a_part_of_the_caches() -> None:
    """A state takes 2 x 20 numbers. The longest request needs 48 slots of 2 x 2 x 8 numbers."""

    def sized(free: int, asked: int | None = None) -> tuple[ServingConfig, StageMemory]:
        room = StageRoom(layers=range(2), n_devices=1, itemsize=4, attention="native", free=free)
        serving = serving_config(ATTENDING_LAST, Sizes(snapshot_bytes=asked), [room])
        memory = room.memory(ATTENDING_LAST, engine_shape(ATTENDING_LAST, serving, n_workers=1))
        assert memory.snapshots == serving.n_snapshots * 160
        assert memory.fixed - memory.weights + serving.n_slots * memory.slot <= free
        return serving, memory

    assert sized(1 << 30)[0].n_snapshots == 8 * 32, "of each place of a batch"
    assert sized(1 << 30, 5 * 160 + 159)[0].n_snapshots == 5
    serving, memory = sized(1 << 30, 0)
    assert serving.n_snapshots == 0 and not serving.scheduling.prefix_caching
    fixed = memory.fixed - memory.weights
    assert sized(fixed + 80 * 128)[0].n_snapshots == 20 * 128 // 160, "a quarter"
    assert sized(fixed + 50 * 128)[0].n_snapshots == 2 * 128 // 160, "what the longest request leaves"


def test_json_has_every_kind_of_recurrence() -> None:
    assert config_from_json(config_to_json(EVERY), plain_error) == EVERY


def test_a_state_has_the_same_bytes_whatever_the_length() -> None:
    """Two convolutions of 20 channels, of widths 3 and 4: (2 + 3) * 20 numbers a request."""
    assert state_bytes(RECURRENT_LAST, range(3), 1, 4) == 5 * 20 * 4
    assert slot_bytes(RECURRENT_LAST, range(3), 1, 4) == 2 * 2 * 8 * 4  # of the one attention layer
