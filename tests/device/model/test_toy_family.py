"""A family defined in this file alone: loading, planning, sharding and converting need only its table.

Its norms are RMSNorm, its activation is SiLU, nothing has a bias, no position is added, and its two layers
have feed-forward parts of different widths. Its reference is plain NumPy.
"""

import json
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.convert import convert_checkpoint
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ParallelConfig, Sizes
from orca_jax.errors import BadModelConfig, ConfigError, UnsupportedModel
from orca_jax.families import registry
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.config_json import config_to_json
from orca_jax.families.family import Family
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import (
    Activation,
    Attention,
    Embedding,
    FeedForward,
    Layer,
    ModelConfig,
    Norm,
)
from orca_jax.families.registry import FAMILIES, register
from orca_jax.families.stored_name import as_it_is, stacked, transposed
from orca_jax.model import reference
from orca_jax.model.transformer import init_parameters
from orca_jax.planning.known_devices import gpu_named
from orca_jax.planning.plan import PlanTarget, make_plan
from server import cli
from tests.device.checkpoint.tiny_checkpoint import Tensors, write_checkpoint, write_json

CONFIG: dict[str, Any] = {
    "model_type": "toy",
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 61,
    "context": 48,
    "width": 32,
    "heads": 4,
    "inner": [48, 80],
    "nonlinearity": "swish",
    "eps": 1e-4,
}
ACTIVATIONS: dict[str, Activation] = {"swish": "silu"}
PROMPTS = ([7], [3, 14, 15, 9, 26, 5, 35, 8], [60, 0, 60], [*range(1, 40)])
N_GENERATED = 9


def _read(fields: ConfigFields) -> ModelConfig:
    width, heads = fields.whole("width"), fields.whole("heads")
    norm = Norm(kind="rms_norm", eps=fields.number("eps", 1e-6))
    activation = fields.choice("nonlinearity", ACTIVATIONS, "swish")
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("context"),
        hidden_size=width,
        layers=tuple(
            Layer(
                attention=Attention(
                    n_heads=heads,
                    n_kv_heads=heads,
                    head_size=width // heads,
                    qkv_bias=False,
                    out_bias=False,
                ),
                feed_forward=FeedForward(size=inner, activation=activation, bias=False),
                norm=norm,
            )
            for inner in fields.raw("inner")
        ),
        embedding=Embedding(size=width, tied=False),
        positions=None,
        final_norm=norm,
    )


def _write(model: ModelConfig) -> dict[str, Any] | None:
    norm = model.layers[0].norm
    if norm.kind != "rms_norm":
        return None
    return {
        "vocab_size": model.vocab_size,
        "context": model.n_positions,
        "width": model.hidden_size,
        "heads": model.n_heads,
        "inner": [each.size for each in model.feed_forwards],
        "nonlinearity": "swish",
        "eps": norm.eps,
    }


TOY = Family(
    model_type="toy",
    title="Toy",
    architectures=("ToyForCausalLM",),
    config_names={"hidden_size": "width", "n_heads": "heads", "norm_eps": "eps"},
    read=_read,
    write=_write,
    prefixes=("toy.",),
    weights={
        "token_embedding": as_it_is("{prefix}words"),
        "layers.{i}.qkv.weight": stacked(*(f"{{prefix}}blocks.{{i}}.attend.{part}" for part in "qkv")),
        "layers.{i}.out.weight": transposed("{prefix}blocks.{i}.attend.merge"),
        "layers.{i}.up.weight": as_it_is("{prefix}blocks.{i}.widen"),
        "layers.{i}.down.weight": transposed("{prefix}blocks.{i}.narrow"),
        "layers.{i}.attn_norm.scale": as_it_is("{prefix}blocks.{i}.gain_1"),
        "layers.{i}.mlp_norm.scale": as_it_is("{prefix}blocks.{i}.gain_2"),
        "final_norm.scale": as_it_is("{prefix}gain"),
        "head.weight": as_it_is("unembed"),
    },
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(TOY)
    yield
    registry._families.pop("toy")


@cache
def tensors() -> Tensors:
    """Random tensors, spread so that greedy tokens vary."""
    rng = np.random.default_rng(0)
    h, v = CONFIG["width"], CONFIG["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"toy.words": (v, h), "toy.gain": (h,), "unembed": (v, h)}
    for i, inner in enumerate(CONFIG["inner"]):
        shapes |= {f"toy.blocks.{i}.attend.{part}": (h, h) for part in ("q", "k", "v", "merge")}
        shapes |= {f"toy.blocks.{i}.widen": (inner, h), f"toy.blocks.{i}.narrow": (inner, h)}
        shapes |= {f"toy.blocks.{i}.gain_1": (h,), f"toy.blocks.{i}.gain_2": (h,)}
    return {name: (0.4 * rng.standard_normal(shape)).astype("f4") for name, shape in shapes.items()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "toy", CONFIG, tensors(), n_files=2)


def logits(token_ids: list[int]) -> np.ndarray:
    """Logits [T, V] of every position of a sequence, in float64."""
    p = {name: value.astype("f8") for name, value in tensors().items()}
    n, heads = len(token_ids), CONFIG["heads"]

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + CONFIG["eps"]) * gain

    x = p["toy.words"][token_ids]
    for i in range(2):
        block = f"toy.blocks.{i}"
        y = norm(x, p[f"{block}.gain_1"])
        q, k, v = (
            (y @ p[f"{block}.attend.{part}"].T).reshape(n, heads, -1).transpose(1, 0, 2) for part in "qkv"
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[2])
        scores[:, ~np.tri(n, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ p[f"{block}.attend.merge"]
        inner = norm(x, p[f"{block}.gain_2"]) @ p[f"{block}.widen"].T
        x = x + (inner / (1 + np.exp(-inner))) @ p[f"{block}.narrow"]
    return norm(x, p["toy.gain"]) @ p["unembed"].T


@cache
def greedy() -> list[list[int]]:
    """Each prompt's greedy tokens; no choice is close."""
    outputs: list[list[int]] = []
    for prompt in PROMPTS:
        known = [*prompt]
        for _ in range(N_GENERATED):
            last = logits(known)[-1]
            second, best = np.sort(last)[-2:]
            assert best - second > 1e-3
            known.append(int(last.argmax()))
        outputs.append(known[len(prompt) :])
    assert len({token for output in outputs for token in output}) > 8, "they vary"
    return outputs


def test_it_loads(directory: Path) -> None:
    loaded = load_checkpoint(directory, dtype=np.float32)
    assert [each.size for each in loaded.config.feed_forwards] == [48, 80]
    stored = tensors()
    for name, expected in {
        "token_embedding": stored["toy.words"],
        "layers.1.qkv.weight": np.stack([stored[f"toy.blocks.1.attend.{part}"] for part in "qkv"]),
        "layers.0.out.weight": stored["toy.blocks.0.attend.merge"].T,
        "layers.1.down.weight": stored["toy.blocks.1.narrow"].T,
        "layers.0.mlp_norm.scale": stored["toy.blocks.0.gain_2"],
        "head.weight": stored["unembed"],
    }.items():
        np.testing.assert_array_equal(np.asarray(loaded.parameters[name]), expected, name)
    ours = jax.jit(reference.forward, static_argnums=0)(
        loaded.config, loaded.parameters, jnp.array(PROMPTS[-1])
    )
    np.testing.assert_allclose(np.asarray(ours), logits([*PROMPTS[-1]]), atol=1e-4, rtol=0)


def test_it_plans(directory: Path) -> None:
    model = read_config(directory)
    dtype = jnp.dtype("bfloat16")
    drawn = jax.eval_shape(partial(init_parameters, model, dtype=dtype), jax.random.key(0))
    n_elements = sum(value.size for value in tensors().values())
    assert sum(value.size for value in drawn.values()) == n_elements

    def planned(n_stages: int, n_devices: int) -> list[int]:
        plan = make_plan(
            PlanTarget(
                config=model,
                device=gpu_named("h200"),
                sizes=Sizes(),
                dtype="bfloat16",
                context=32,
                parallel=ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=n_devices),
            )
        )
        return [stage.memory.weights for stage in plan.stages]

    assert planned(1, 1) == [2 * n_elements]
    assert planned(2, 1) == [
        sum(value.size * 2 for name, value in drawn.items() if name.startswith(of_stage))
        for of_stage in (("token", "layers.0"), ("layers.1", "final", "head"))
    ]
    # Norms are whole on both devices, and 61 rows of two tables shared as 31 and 30.
    assert planned(1, 2) == [2 * ((n_elements - 5 * 32 - 2 * 61 * 32) // 2 + 5 * 32 + 2 * 31 * 32)]


@pytest.mark.parametrize(
    "split",
    [{}, pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.long)],
    ids=["whole", "split"],
)
def test_it_generates(directory: Path, split: dict[str, Any]) -> None:
    with LLM(directory, max_batch_size=4, n_slots=256, max_batch_tokens=48, **split) as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=N_GENERATED, temperature=0.0))
    assert [list(result.token_ids) for result in results] == greedy()


def test_the_commands_know_it(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(directory), "--device", "h200", "--no-compile", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"] == sum(value.size for value in tensors().values())
    prompt = ("generate", "--model", str(directory))
    assert cli.main([*prompt, "words"]) == 2  # it has no tokenizer: the model itself was found
    assert "tokenizer" in capsys.readouterr().err
    (tmp_path / "tou").mkdir()
    write_json(tmp_path / "tou" / "config.json", CONFIG | {"model_type": "tou"})
    assert cli.main(["plan", str(tmp_path / "tou"), "--device", "h200"]) == 2
    assert re.search(r"one of gpt2, .*, toy, found 'tou'", capsys.readouterr().err)


def test_it_converts(directory: Path, tmp_path: Path) -> None:
    assert convert_checkpoint(directory, tmp_path / "orbax") == "orbax"
    assert convert_checkpoint(tmp_path / "orbax", tmp_path / "back") == "safetensors"
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors())
    for name, value in tensors().items():
        np.testing.assert_array_equal(back[name], value, name)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_orca_json_describes_it(directory: Path, tmp_path: Path) -> None:
    """orca.json describes a model without config.json; a family that can express it then writes one."""
    convert_checkpoint(directory, tmp_path / "orbax")
    model = read_config(directory)
    (tmp_path / "orbax" / "config.json").unlink()
    write_json(tmp_path / "orbax" / "orca.json", {"model": config_to_json(model)})
    loaded = load_checkpoint(tmp_path / "orbax", dtype=np.float32)
    assert loaded.config == model
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert read_config(tmp_path / "back") == model
    described = config_to_json(model)
    described["layers"][1]["residual"] = "sideways"
    write_json(tmp_path / "orbax" / "orca.json", {"model": described})
    with pytest.raises(
        BadModelConfig, match=r"orca\.json: model: residual is 'sideways'; it must be one of pre"
    ):
        load_checkpoint(tmp_path / "orbax", dtype=np.float32)
    del described["layers"][1]["attention"]
    write_json(tmp_path / "orbax" / "orca.json", {"model": described})
    with pytest.raises(BadModelConfig, match=r"model\.layers\[1\]\.attention: expected an object"):
        load_checkpoint(tmp_path / "orbax", dtype=np.float32)


def test_it_is_known_while_it_is_registered(directory: Path) -> None:
    with pytest.raises(ConfigError, match="'toy' is registered already"):
        register(TOY)
    registry._families.pop("toy")
    assert "toy" not in FAMILIES
    with pytest.raises(UnsupportedModel, match=r"model_type: expected one of gpt2, opt, .*, found 'toy'"):
        read_config(directory)
    register(TOY)
