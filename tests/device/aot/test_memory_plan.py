"""Planned memory against XLA's memory plan, for this CPU and, with the CUDA plugin, for an H200."""

from dataclasses import replace

import pytest

from orca_jax.config import ParallelConfig, Sizes
from orca_jax.families.attention_config import Indexer, Latent, latent_attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Rotary
from orca_jax.planning.known_devices import KnownDevice, cpu_device, gpu_named
from orca_jax.planning.plan import Plan, PlanTarget, make_plan
from orca_jax.planning.sizes import n_rows
from orca_jax.workers.ask_xla import MemoryQuestion, ask_memory, ask_rates
from tests.device.aot.without_gpu import needs_plugin, run_without_gpu

CPU = cpu_device(memory=16 << 30, bandwidth=3e10, matrix_rate=2e11)


def planned(
    model: str | ModelConfig, device: KnownDevice, dtype: str, n_stages: int, tensor: int
) -> tuple[Plan, tuple[int, ...]]:
    """A memory plan, and the temporaries that XLA allocates for each stage."""
    plan = make_plan(
        PlanTarget(
            config=PRESETS[model] if isinstance(model, str) else model,
            device=device,
            sizes=Sizes(),
            dtype="float32" if dtype == "float32" else "bfloat16",
            context=256,
            parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor),
        )
    )
    question = MemoryQuestion(
        device=device.name,
        model=plan.target.model,
        serving=plan.serving,
        dtype=dtype,
        parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor),
        n_rows=n_rows(plan.serving.max_batch_size, n_workers=n_stages),
    )
    return plan, ask_memory(question, 280.0)


def off(plan: Plan, compiled: tuple[int, ...]) -> list[float]:
    """Each stage's relative error in total memory, against XLA's."""
    errors: list[float] = []
    for stage, temporaries in zip(plan.stages, compiled, strict=True):
        rest = stage.memory.weights + stage.memory.tables + plan.serving.n_slots * stage.memory.slot
        errors.append((rest + stage.memory.temporaries) / (rest + temporaries) - 1)
    return errors


def test_the_demo_model_on_a_cpu_needs_the_planned_memory() -> None:
    plan, compiled = planned("demo", CPU, "float32", 1, 1)
    assert max(map(abs, off(plan, compiled))) < 0.05


@pytest.mark.long
def test_stages_and_parts_are_compiled_one_by_one() -> None:
    plan, compiled = planned("demo", CPU, "float32", 2, 2)
    assert len(compiled) == 2 and all(n > 1 << 20 for n in compiled)
    assert max(map(abs, off(plan, compiled))) < 0.2  # little weight in each, so that temporaries tell


def latent_model() -> ModelConfig:
    """Three layers in which the arrays between queries and cache are large."""
    latent = Latent(rank=128, rotary_size=64, plain_size=64, value_size=64, query_rank=96)
    own = latent_attention(latent, n_heads=16, rotary=Rotary(size=64), qkv_bias=False, out_bias=False)
    norm = Norm(kind="rms_norm")
    feed_forward = FeedForward(size=512, activation="silu", gated=True, bias=False)
    return ModelConfig(
        vocab_size=2048,
        n_positions=1024,
        hidden_size=256,
        layers=alike(Layer(attention=own, feed_forward=feed_forward, norm=norm), 3),
        embedding=Embedding(size=256, tied=False),
        positions=None,
        final_norm=norm,
    )


@pytest.mark.long
def test_latent_attention_on_a_cpu_needs_the_planned_memory() -> None:
    plan, compiled = planned(latent_model(), CPU, "float32", 1, 2)
    assert max(map(abs, off(plan, compiled))) < 0.2  # 0.01 where XLA optimizes, as it does for users


@needs_plugin
@pytest.mark.long
def test_latent_attention_on_an_h200_needs_the_planned_memory() -> None:
    plan, compiled = planned(latent_model(), gpu_named("h200"), "bfloat16", 1, 1)
    assert max(map(abs, off(plan, compiled))) < 0.05


@pytest.mark.long
def test_a_cpus_rates_are_measured() -> None:
    bandwidth, matrix_rate = ask_rates("float32")
    assert 1e8 < bandwidth < 1e13 and 1e8 < matrix_rate < 1e15


@needs_plugin
@pytest.mark.parametrize("name", ["demo", "gpt2"])
def test_an_h200_needs_the_planned_memory(name: str) -> None:
    plan, compiled = planned(name, gpu_named("h200"), "bfloat16", 1, 1)
    assert max(map(abs, off(plan, compiled))) < 0.05


@needs_plugin
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "n_stages"), [("mixtral-8x7b", 2), ("qwen3-30b-a3b", 4)])
def test_mixtures_on_h200s_need_the_planned_memory(name: str, n_stages: int) -> None:
    """Two layers per stage, as below: on one device, split over several, and in two stages."""
    check = ("--devices", "h200", "--models", name, "--layers", "2")
    stages = run_without_gpu("-m", "bench.compiled.plan_check", *check)["stages"]
    assert len(stages) == n_stages
    for row in stages:
        for part in ("arguments", "temporaries"):
            assert abs(row[f"planned_{part}"] / row[f"compiled_{part}"] - 1) < 0.05, (row, part)


@needs_plugin
@pytest.mark.long
@pytest.mark.timeout(300)
def test_large_llamas_on_h200s_need_the_planned_memory() -> None:
    """Two layers per stage, so that temporaries and kept results outweigh weights."""
    models = "llama-3.1-70b,llama-3.1-405b"
    check = ("--devices", "h200", "--models", models, "--layers", "2")
    stages = run_without_gpu("-m", "bench.compiled.plan_check", *check)["stages"]
    assert [(row["model"], row["tensor"], row["layers"]) for row in stages] == [
        ("llama-3.1-70b", 4, [1, 2]),
        ("llama-3.1-405b", 8, [1, 2]),
        ("llama-3.1-405b", 8, [3, 4]),
    ]
    for row in stages:
        for part in ("arguments", "temporaries"):
            assert abs(row[f"planned_{part}"] / row[f"compiled_{part}"] - 1) < 0.05, (row, part)


def with_indexer(top_k: int) -> ModelConfig:
    """The same layers, each with an indexer."""
    model = latent_model()
    indexer = Indexer(n_heads=16, head_size=128, top_k=top_k)
    return replace(model, layers=tuple(layer.with_attention(indexer=indexer) for layer in model.layers))


@pytest.mark.long
def test_sparse_attention_on_a_cpu_needs_the_planned_memory() -> None:
    plan, compiled = planned(with_indexer(128), CPU, "float32", 1, 1)
    assert max(map(abs, off(plan, compiled))) < 0.2


@needs_plugin
@pytest.mark.long
@pytest.mark.parametrize("top_k", [128, 512])
def test_sparse_attention_on_an_h200_needs_the_planned_memory(top_k: int) -> None:
    plan, compiled = planned(with_indexer(top_k), gpu_named("h200"), "bfloat16", 1, 1)
    assert max(map(abs, off(plan, compiled))) < 0.05
