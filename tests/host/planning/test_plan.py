"""Plans: figures worked by hand, what fits and what does not, floors, and the recommended max_bs."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.packed_form import EXACT_MXFP4
from orca_jax.families.parameters import parameter_table, stage_bytes
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.cost_model import IterationShape, operations, parameter_count
from orca_jax.planning.device_traffic import shared_bytes
from orca_jax.planning.known_devices import GPUS, cpu_device, gpu_named
from orca_jax.planning.plan import MAX_BS, Plan, PlanTarget, iteration_floor, make_plan, recommend
from orca_jax.planning.sizes import batch_tokens, engine_shape, serving_config
from orca_jax.planning.stage_layers import stage_layers
from orca_jax.planning.stage_memory import (
    StageRoom,
)
from tests.gpt_config import gpt_config

SMALL = gpt_config(vocab_size=10, n_positions=8, hidden_size=4, n_layers=3, n_heads=2, ffn_size=16)
PAPER = (("gpt3-13b", 1, 1), ("gpt3-101b", 1, 8), ("gpt3-175b", 2, 8), ("gpt3-341b", 4, 8))


def target(
    name: str, device: str, n_stages: int = 1, tensor: int = 1, context: int = 512, sizes: Sizes | None = None
) -> PlanTarget:
    return PlanTarget(
        config=PRESETS[name],
        device=gpu_named(device),
        sizes=sizes or Sizes(),
        dtype="bfloat16",
        context=context,
        parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor),
    )


def shape_of(model: ModelConfig, serving: ServingConfig) -> EngineShape:
    return engine_shape(model, serving, n_workers=1)


@cache
def paper_plan(name: str, n_stages: int, tensor: int) -> Plan:
    return make_plan(target(name, "a100-40gb", n_stages, tensor))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_the_stages_hold_every_parameter_once_but_a_tied_table(name: str, n_stages: int) -> None:
    model = PRESETS[name]
    stages = [stage_bytes(model, layers, 1, 4) for layers in stage_layers(model.n_layers, n_stages)]
    twice = n_stages > 1 and model.embedding.tied
    table = model.padded_vocab_size * model.embedding.size if twice else 0
    n_packed = sum(math.prod(one.shape) for one in parameter_table(model).values() if one.form == EXACT_MXFP4)
    assert sum(stages) == 4 * (parameter_count(model) - n_packed + table) + n_packed * 17 // 32


def test_a_vocabulary_is_padded_for_the_devices_that_share_it() -> None:
    odd = replace(SMALL, vocab_size=11)
    assert odd.for_devices(2).padded_vocab_size == 12
    assert odd.for_devices(1) is odd
    assert PRESETS["gpt3-13b"].for_devices(8) is PRESETS["gpt3-13b"]  # 50,304 is a multiple of 8


def test_the_largest_number_of_slots_that_fits() -> None:
    shape = shape_of(SMALL, ServingConfig(max_batch_size=2, max_batch_tokens=8, block_size=4))
    room = StageRoom(layers=range(3), n_devices=1, itemsize=4, attention="kernel", free=None)
    memory = room.memory(SMALL, shape)
    room = replace(room, free=memory.tables + memory.temporaries + 5 * memory.slot + memory.slot - 1)
    assert room.slots(memory) == 5
    assert replace(room, modest=3 * memory.slot).slots(memory) == 3
    assert replace(room, modest=9 * memory.slot).slots(memory) == 5
    assert replace(room, free=0).slots(memory) == 0
    assert replace(room, free=None, modest=7 * memory.slot).slots(memory) == 7
    compiled = replace(room, temporaries=memory.temporaries + 2 * memory.slot)
    result = compiled.memory(SMALL, shape)
    assert (result.source, compiled.slots(result)) == ("compiled", 3)


def test_n_slots_are_the_largest_up_to_what_admitted_requests_can_reserve() -> None:
    def n_slots(free: int | None, modest: int | None = None, n_stages: int = 1) -> int:
        rooms = [
            StageRoom(layers=layers, n_devices=1, itemsize=4, attention="kernel", free=free, modest=modest)
            for layers in stage_layers(SMALL.n_layers, n_stages)
        ]
        return serving_config(SMALL, Sizes(max_batch_size=4, block_size=4), rooms).n_slots

    assert n_slots(1 << 40) == 2 * 4 * 8, "a batch that runs and one that is prepared, of 8 tokens each"
    assert n_slots(1 << 40, n_stages=3) == 4 * 4 * 8
    assert n_slots(1 << 40, modest=1 << 30) == 4 * 8, "where memory is for others too, one full batch"
    assert n_slots(None, modest=20 * 96) == 20, "96 bytes a slot: 2 x 3 layers x 4 elements of 4 bytes"
    assert n_slots(0) == 8, "one request at least; whether there is room for it is checked apart"


@pytest.mark.parametrize(
    "whole_prompts", [Sizes(chunked_prefill=False), Sizes(policy="orca"), Sizes(deterministic=True)]
)
def test_an_iteration_may_be_smaller_than_the_longest_prompt_if_prompts_are_chunked(
    whole_prompts: Sizes,
) -> None:
    room = StageRoom(layers=range(3), n_devices=1, itemsize=4, attention="kernel", free=1 << 30)

    def serving(sizes: Sizes, max_batch_tokens: int | None) -> ServingConfig:
        sizes = replace(sizes, max_batch_size=4, block_size=4, max_batch_tokens=max_batch_tokens)
        return serving_config(SMALL, sizes, [room])

    assert serving(Sizes(), 7).max_batch_tokens == 7
    assert serving(whole_prompts, 8).max_batch_tokens == 8
    with pytest.raises(ConfigError, match="is 7; without chunked_prefill it must be at least the model's 8"):
        serving(whole_prompts, 7)
    assert serving(Sizes(), None).max_batch_tokens == serving(whole_prompts, None).max_batch_tokens == 2048
    long = replace(SMALL, n_positions=10_000)
    assert batch_tokens(long, Sizes()) == 8192
    assert batch_tokens(long, whole_prompts) == 10_000


@pytest.mark.parametrize(("name", "n_stages", "tensor"), PAPER)
def test_the_papers_models_fit_where_the_paper_ran_them(name: str, n_stages: int, tensor: int) -> None:
    plan = paper_plan(name, n_stages, tensor)
    assert plan.fits and plan.hint is None
    assert [stage.memory.source for stage in plan.stages] == ["arithmetic"] * n_stages
    whole = sum(stage.memory.weights for stage in plan.stages) * tensor
    assert whole == pytest.approx(2 * parameter_count(PRESETS[name]), rel=0.02)
    for stage in plan.stages:
        memory = stage.memory
        assert memory.fixed + stage.slots * memory.slot <= 0.9 * (40 << 30)
        assert memory.fixed + (stage.slots + 1) * memory.slot > 0.9 * (40 << 30)
    assert plan.serving.n_slots <= min(stage.slots for stage in plan.stages)


def test_a_model_that_does_not_fit_is_reported_with_a_split_that_does() -> None:
    plan = make_plan(target("gpt3-175b", "a100-40gb", 1, 8))
    assert not plan.fits
    (stage,) = plan.stages
    assert stage.problem is not None and stage.problem.startswith("stage 1 needs 40.71 GiB of weights")
    assert "may use 36.00 GiB" in stage.problem
    assert plan.hint == "use --pipeline-parallel 2"
    assert make_plan(target("gpt3-175b", "a100-40gb", 2, 8)).fits
    oversized = make_plan(target("gpt3-13b", "a100-40gb", sizes=Sizes(n_slots=40_000)))
    assert oversized.hint == "use --pipeline-parallel 2 or --tensor-parallel 2"
    assert oversized.stages[0].problem is not None and "40000 slots of n_slots" in oversized.stages[0].problem
    for n_stages, tensor in ((2, 1), (1, 2)):
        assert make_plan(target("gpt3-13b", "a100-40gb", n_stages, tensor, sizes=Sizes(n_slots=40_000))).fits


def test_a_draft_model_takes_its_weights_and_slots() -> None:
    alone = target("llama-3.1-8b", "h100")
    drafted = replace(alone, draft=PRESETS["llama-3.2-1b"])
    before, after = (make_plan(one).stages[0] for one in (alone, drafted))
    draft = after.draft
    assert draft is not None and before.draft is None and before.memory == after.memory
    assert draft.weights == stage_bytes(PRESETS["llama-3.2-1b"], range(16), 1, 2)
    assert draft.weights < draft.fixed < draft.weights + (1 << 30)
    assert draft.slot == 2 * 16 * 8 * 64 * 2  # keys and values, layers, heads, head size, bytes
    budget = before.slots * before.memory.slot
    assert after.slots == pytest.approx((budget - draft.fixed) / (after.memory.slot + draft.slot), abs=1)
    # On the first stage alone.
    staged = make_plan(replace(drafted, parallel=ParallelConfig(pipeline_parallel=2))).stages
    assert staged[0].draft == draft and staged[1].draft is None
    small = replace(drafted, device=replace(drafted.device, memory=20 << 30))
    (problem,) = [stage.problem for stage in make_plan(small).stages]
    assert problem is not None and "GiB of the draft model" in problem
    with pytest.raises(ConfigError, match="the draft model off has an encoder, and cannot draft yet"):
        replace(alone, draft=PRESETS["t5-small"])


def test_where_one_way_alone_does_not_do_both_are_hinted_at() -> None:
    tiny = replace(GPUS["h200"], memory=8 << 30)
    plan = make_plan(replace(target("gpt3-341b", "h200"), device=tiny))
    assert plan.hint is not None
    words = plan.hint.split()
    assert words[:2] == ["use", "--pipeline-parallel"] and words[3] == "--tensor-parallel"
    parallel = ParallelConfig(pipeline_parallel=int(words[2]), tensor_parallel=int(words[4]))
    assert make_plan(replace(plan.target, parallel=parallel)).fits
    hopeless = make_plan(replace(plan.target, device=replace(tiny, memory=1 << 28)))
    assert hopeless.hint is not None and hopeless.hint.startswith("no split over up to 64 stages")


def test_a_cpu_gets_a_modest_cache_by_default() -> None:
    cpu = cpu_device(memory=16 << 30, bandwidth=3e10, matrix_rate=2e11)
    modest = replace(target("gpt2", "h200"), device=cpu, dtype="float32")
    assert make_plan(modest).serving.n_slots == (2 << 30) // (2 * 12 * 768 * 4)
    smaller = make_plan(replace(modest, sizes=Sizes(memory_fraction=0.5)))
    assert smaller.serving.n_slots == 2 * 32 * 1024
    assert smaller.stages[0].memory.fixed + smaller.stages[0].slots * smaller.stages[0].memory.slot <= 8 << 30
    assert "no split helps" in str(make_plan(replace(modest, device=replace(cpu, memory=1 << 28))).hint)


def test_the_stages_do_the_whole_models_operations() -> None:
    shape = IterationShape([1, 7], [6, 7])
    whole = operations(SMALL, shape, weight_bytes=4, kv_bytes=4)
    cut = [
        op
        for layers in stage_layers(3, 2)
        for op in operations(SMALL, shape, weight_bytes=4, kv_bytes=4, layers=layers)
    ]
    assert cut == whole


def test_two_devices_share_the_products_worked_by_hand() -> None:
    # T = 3 tokens of R = 2 rows, H = 4, F = 16, V = 10; n = 2.
    shape = IterationShape([1, 2], [3, 2])
    qkv, attention, out, up, down = operations(
        SMALL, shape, weight_bytes=4, kv_bytes=2, layers=range(1, 2), n_shards=2
    )
    assert (qkv.n_flops, out.n_flops) == (2 * 3 * 4 * 6, 2 * 3 * 2 * 4)
    assert (up.n_flops, down.n_flops) == (2 * 3 * 4 * 8, 2 * 3 * 8 * 4)
    assert qkv.n_bytes == 4 * (4 * 6 + 6 + 3 * (4 + 6))
    assert out.n_bytes == 4 * (2 * 4 + 4 + 3 * (2 + 4))
    assert attention.n_bytes == (3 + 5) * 2 * 2 * 2 + 2 * 3 * 2 * 4
    *_, head, sampler = operations(SMALL, shape, weight_bytes=4, kv_bytes=2, layers=range(2, 3), n_shards=2)
    assert head.n_flops == 2 * 2 * 4 * 5 and sampler.n_bytes == 4 * 2 * 10
    # A ring sends (n - 1) / n of 3 x 4 elements of 4 bytes twice, for 2 sums a layer and the embedding's.
    assert shared_bytes(SMALL, shape, weight_bytes=4, layers=range(1, 2), n_shards=2) == 2 * 48
    assert shared_bytes(SMALL, shape, weight_bytes=4, layers=range(2), n_shards=2) == 5 * 48
    gathered = 2 * 10 * 4 / 2
    # The last layer sums the 2 rows' last tokens.
    assert shared_bytes(SMALL, shape, weight_bytes=4, layers=range(2, 3), n_shards=2) == 2 * 32 + gathered
    assert shared_bytes(SMALL, shape, weight_bytes=4) == 0


def test_a_floor_worked_by_hand() -> None:
    # One token reads each weight but the position table once, and its keys and values: 25.7 GB at 4.8 TB/s.
    floor = iteration_floor(target("gpt3-13b", "h200", context=1), "decode", 1)
    assert floor.seconds == pytest.approx(25.7e9 / 4.8e12, rel=0.01)
    assert floor.bound == "bandwidth" and floor.n_tokens == 1
    # 2 operations a weight and token, the tables aside: 12.6e9 weights, 2,048 tokens.
    prompt = iteration_floor(target("gpt3-13b", "h200", context=2048), "prefill", 1)
    n_weights = 12 * 40 * 5120**2
    attention = 40 * 4 * 5120 * 2048 * 2049 / 2
    assert prompt.seconds == pytest.approx((2 * n_weights * 2048 + attention) / 989.5e12, rel=0.03)
    assert prompt.bound == "matrix rate" and prompt.n_tokens == 2048


def test_stages_and_the_links_between_them() -> None:
    one, two = (iteration_floor(target("gpt3-13b", "h200", n), "decode", 8) for n in (1, 2))
    hop = 8 * 5120 * 2 / GPUS["h200"].inside
    # The head's stage reads the tied table too, so both read it only where it is used.
    assert two.seconds == pytest.approx(one.seconds + hop, rel=1e-9)
    assert one.seconds / 2 < two.interval < 0.6 * one.seconds
    assert two.tokens_per_second == 8 / two.interval
    far = iteration_floor(target("gpt3-13b", "h200", 2, 8), "decode", 8)
    near = iteration_floor(target("gpt3-13b", "h200", 2, 4), "decode", 8)
    assert far.seconds < near.seconds
    slow = replace(target("gpt3-13b", "h200", 2, 8), device=replace(GPUS["h200"], between=1e9))
    assert iteration_floor(slow, "decode", 8).seconds == pytest.approx(
        far.seconds + 8 * 5120 * 2 * (1e-9 - 1 / GPUS["h200"].between)
    )


BUDGETED = target("gpt3-13b", "h200", context=256)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=2))
def test_a_larger_budget_never_recommends_less(budgets: list[float]) -> None:
    less, more = (recommend(BUDGETED, budget) for budget in sorted(budgets))
    assert less.max_bs <= more.max_bs


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-4, 1.0))
def test_the_recommended_one_meets_the_budget_and_one_more_does_not(budget: float) -> None:
    recommended = recommend(BUDGETED, budget)
    if recommended.max_bs:
        seconds = iteration_floor(BUDGETED, "decode", recommended.max_bs).seconds
        assert seconds == recommended.seconds <= budget
        plan = make_plan(replace(BUDGETED, sizes=replace(BUDGETED.sizes, max_batch_size=recommended.max_bs)))
        assert plan.fits and plan.stages[0].slots >= recommended.max_bs * 256
    more = recommended.max_bs + 1
    if recommended.bound == "latency":
        assert iteration_floor(BUDGETED, "decode", more).seconds > budget
    elif recommended.bound == "slots":
        plan = make_plan(replace(BUDGETED, sizes=replace(BUDGETED.sizes, max_batch_size=more)))
        assert plan.stages[0].slots < more * 256
    else:
        assert more == MAX_BS + 1


def test_what_bounds_a_recommendation() -> None:
    assert recommend(BUDGETED, 1e-4).max_bs == 0
    assert recommend(BUDGETED, 1e-4).bound == "latency"
    assert recommend(BUDGETED, 1.0).bound == "slots"
    tiny = PlanTarget(config=SMALL, device=GPUS["h200"], sizes=Sizes(), dtype="bfloat16", context=8)
    assert recommend(tiny, 1.0) == recommend(tiny, 2.0).__class__(
        budget=1.0, max_bs=MAX_BS, seconds=iteration_floor(tiny, "decode", MAX_BS).seconds, bound="limit"
    )
    few = replace(BUDGETED, sizes=Sizes(n_slots=2048))
    assert (recommend(few, 1.0).max_bs, recommend(few, 1.0).bound) == (8, "slots")
    # XLA's figure for temporaries, at the requested sizes, leaves less room.
    compiled = replace(BUDGETED, temporaries=(40 << 30,))
    assert 0 < recommend(compiled, 1.0).max_bs < recommend(BUDGETED, 1.0).max_bs


def test_temporaries_from_xla_replace_the_estimate() -> None:
    plain = make_plan(target("gpt3-175b", "h200", 2, 4))
    compiled = make_plan(replace(plain.target, temporaries=(5 << 30, 6 << 30)))
    assert [stage.memory.temporaries for stage in compiled.stages] == [5 << 30, 6 << 30]
    assert [stage.memory.source for stage in compiled.stages] == ["compiled"] * 2
    assert compiled.stages[1].slots < plain.stages[1].slots


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tensor_parallel=7)}, "n_heads 40 is not a multiple of it"),
        ({"parallel": ParallelConfig(pipeline_parallel=41)}, "n_layers is 40"),
        ({"context": 0}, "context is 0; it must be from 1 to the model's 2048"),
        ({"context": 2049}, "context is 2049"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(target("gpt3-13b", "h200"), **changes)


def test_an_unknown_device_is_reported_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'v100'; it must be one of a100-40gb, a100-80gb, l40s, h100, h200, b200, cpu"
    ):
        gpu_named("v100")
    for name, device in GPUS.items():
        assert device.name == name
        assert math.isfinite(device.bandwidth) and device.matrix_rates["bfloat16"] > 1e14


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), True, "0.5"])
def test_a_memory_fraction_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(
        ConfigError, match=r"memory_fraction is .*; it must be a number above 0, and at most 1"
    ):
        Sizes(memory_fraction=value)


def test_a_budget_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="latency_budget is 0 seconds"):
        recommend(BUDGETED, 0.0)


@pytest.mark.parametrize(("name", "n_stages", "tensor"), [("deepseek-v3", 2, 8), ("qwen3-30b-a3b", 1, 8)])
def test_slots_count_every_copy_of_a_head(name: str, n_stages: int, tensor: int) -> None:
    """If there are fewer K/V heads than devices, each device still holds a whole head of every slot."""
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    plan = make_plan(
        PlanTarget(
            config=PRESETS[name],
            device=GPUS["h200"],
            sizes=Sizes(max_batch_size=256),
            dtype="bfloat16",
            context=512,
            parallel=parallel,
        )
    )
    assert plan.fits
    assert plan.serving.n_slots == min(stage.slots for stage in plan.stages)
