"""Maps that are suggested for trees of foreign names: loaded by them, the weights are the original's."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from examples import train_and_serve
from orca_jax import LLM, SamplingParams, convert_checkpoint, suggest_names
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.checkpoint.suggested_names import SuggestedNames, match_names
from orca_jax.errors import BadModelConfig, ConfigError, UnsupportedModel
from orca_jax.families.trainers.orca_json import described_model
from server import cli
from tests.device.model.golden import DIRECTORY as GOLDEN

Tree = dict[str, Any]
Array = np.ndarray[Any, Any]


def tensors(name: str) -> dict[str, Array]:
    """The weights of a golden model in the engine's names and shapes."""
    parameters = load_checkpoint(GOLDEN / name, dtype=jnp.float32).parameters
    return {key: np.array(value) for key, value in parameters.items()}


def heads_of(qkv: Array, head_size: int) -> tuple[Array, Array, Array]:
    """Queries [H, N, D], keys and values [H, K, D] of [G + 2, K D, H], query head k G + g from slice g."""
    slices = qkv.reshape(len(qkv), -1, head_size, qkv.shape[-1])  # [G + 2, K, D, H]
    q, k, v = slices[:-2].swapaxes(0, 1).reshape(-1, head_size, qkv.shape[-1]), slices[-2], slices[-1]
    return q.transpose(2, 0, 1), k.transpose(2, 0, 1), v.transpose(2, 0, 1)


def output_of(out: Array, head_size: int) -> Array:
    """[N, D, H] of `out.weight` [H, G, K D]."""
    hidden, group, _ = out.shape
    return out.reshape(hidden, group, -1, head_size).transpose(2, 1, 3, 0).reshape(-1, head_size, hidden)


def gated_layer(p: Mapping[str, Array], i: int, head_size: int) -> Tree:
    """A layer of Llama's kind in foreign names, matrices [in, out]."""
    at = f"layers.{i}."
    q, k, v = heads_of(p[f"{at}qkv.weight"], head_size)
    layer: Tree = {
        "self_attention": {
            "query_proj": {"w": q},
            "key_proj": {"w": k},
            "value_proj": {"w": v},
            "result_out": {"w": output_of(p[f"{at}out.weight"], head_size)},
        },
        "ln_1": {"g": p[f"{at}attn_norm.scale"]},
        "ln_2": {"g": p[f"{at}mlp_norm.scale"]},
    }
    if f"{at}q_norm.scale" in p:
        layer["self_attention"] |= {
            "query_norm": {"g": p[f"{at}q_norm.scale"]},
            "key_norm": {"g": p[f"{at}k_norm.scale"]},
        }
    if f"{at}router.weight" in p:
        gate, up = p[f"{at}experts.up.weight"].transpose(1, 0, 3, 2)
        down = p[f"{at}experts.down.weight"].swapaxes(1, 2)
        layer["moe"] = {"router": p[f"{at}router.weight"].T, "wi_0": gate, "wi_1": up, "wo": down}
    else:
        gate, up = p[f"{at}up.weight"].swapaxes(1, 2)
        layer["ffn"] = {"gate": gate, "up": up, "down": p[f"{at}down.weight"].T}
    return layer


def whole(p: Mapping[str, Array], layers: Any) -> Tree:
    tree: Tree = {
        "tok": {"table": p["token_embedding"]},
        "tower": layers,
        "closing_norm": {"g": p["final_norm.scale"]},
    }
    if "head.weight" in p:
        tree["unembed"] = p["head.weight"].T
    return tree


def by_layer(name: str, head_size: int) -> Tree:
    p, (model, _) = tensors(name), described_model(GOLDEN / name)
    return whole(p, {f"{i}": gated_layer(p, i, head_size) for i in range(model.n_layers)})


def stacked(name: str, head_size: int) -> Tree:
    """As scanned layers are, with one array for all layers."""
    p, (model, _) = tensors(name), described_model(GOLDEN / name)
    layers = [gated_layer(p, i, head_size) for i in range(model.n_layers)]
    return whole(p, joined(layers))


def joined(layers: list[Any]) -> Any:
    if isinstance(layers[0], dict):
        return {key: joined([layer[key] for layer in layers]) for key in layers[0]}
    return np.stack(layers)


def transposed(tree: Any) -> Any:
    """As torch has it: every matrix [out, in], with heads merged; embeddings as they are."""
    if isinstance(tree, dict):
        return {
            key: value if key in ("tok", "closing_norm") else transposed(value) for key, value in tree.items()
        }
    if tree.ndim == 3 and tree.shape[0] > tree.shape[1]:  # [H, N, D]
        return tree.reshape(len(tree), -1).T
    return tree.reshape(-1, tree.shape[-1]).T if tree.ndim == 3 else tree.T


def save(tree: Tree, directory: Path, name: str) -> Path:
    """Save a tree as a training run does, with an optimizer's moments, and the model's config.json."""
    state = {"params": tree, "opt_state": {"mu": tree, "nu": tree, "count": np.zeros((), np.int32)}}
    directory.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "40" / "default", state)
    shutil.copy(GOLDEN / name / "config.json", directory)
    return directory


def tokens(directory: Path) -> list[list[int]]:
    prompts = [[1, 2, 3], [*range(20, 40)], [7]]
    with LLM(directory, max_batch_size=4, max_batch_tokens=32, n_slots=256, dtype="float32") as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("name", "head_size", "make"),
    [
        ("llama-grouped", 10, by_layer),
        ("llama-grouped", 10, stacked),
        ("llama-grouped", 10, lambda *model: transposed(by_layer(*model))),
        ("qwen3-moe-renormalised", 10, by_layer),
        ("qwen3-moe-renormalised", 10, stacked),
    ],
    ids=["by layer", "stacked", "transposed", "experts", "stacked experts"],
)
def test_round_trip(
    name: str,
    head_size: int,
    make: Callable[[str, int], Tree],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    saved = save(make(name, head_size), tmp_path / "run", name)
    names, converted = tmp_path / "names.json", tmp_path / "converted"
    assert cli.main(["convert", str(saved), str(names), "--suggest"]) == 0, capfd.readouterr().err
    assert "the order of rotary pairs cannot be seen" in capfd.readouterr().err
    assert cli.main(["convert", str(saved), str(converted), "--map", str(names)]) == 0
    original, found = tensors(name), load_checkpoint(converted, dtype=jnp.float32).parameters
    assert found.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(np.asarray(found[key]), value, err_msg=key)
    assert tokens(converted) == tokens(GOLDEN / name)
    # As the checkpoint's own orca.json it serves without a conversion.
    shutil.copy(names, saved / "orca.json")
    assert tokens(saved) == tokens(GOLDEN / name)


def test_the_example_that_trains_and_serves(tmp_path: Path) -> None:
    """The map is the one that is written there by hand, in other words."""
    model, optimizer = train_and_serve.train(b"some text to train on " * 20, 1)
    train_and_serve.save(tmp_path, model, optimizer, 1)
    by_hand = {key: np.array(v) for key, v in load_checkpoint(tmp_path, dtype=jnp.float32).parameters.items()}
    written = json.loads((tmp_path / "orca.json").read_text("utf-8"))
    (tmp_path / "orca.json").write_text(json.dumps({"model": written["model"]}), "utf-8")
    suggested = suggest_names(tmp_path)
    assert not suggested.unsure
    (tmp_path / "orca.json").unlink()
    suggested.write(tmp_path / "orca.json")
    found = load_checkpoint(tmp_path, dtype=jnp.float32).parameters
    assert found.keys() == by_hand.keys()
    for key, value in by_hand.items():
        np.testing.assert_array_equal(np.asarray(found[key]), value, err_msg=key)
    assert nnx.state(model, nnx.Param)


def shapes_of(tree: Any, before: str = "") -> dict[str, tuple[int, ...]]:
    if not isinstance(tree, dict):
        return {before: tree.shape}
    return {
        name: shape
        for key, value in tree.items()
        for name, shape in shapes_of(value, f"{before}.{key}" if before else key).items()
    }


def suggested(tree: Tree, name: str = "llama-grouped") -> SuggestedNames:
    return match_names(described_model(GOLDEN / name)[0], shapes_of(tree))


def test_names_that_say_nothing_are_unsure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Gate and up have one shape: both ways are named, and a conversion waits for the user."""
    tree = by_layer("llama-grouped", 10)
    for layer in tree["tower"].values():
        layer["ffn"] = {
            "alpha": layer["ffn"]["gate"],
            "beta": layer["ffn"]["up"],
            "gamma": layer["ffn"]["down"],
        }
    saved = save(tree, tmp_path / "run", "llama-grouped")
    names = tmp_path / "names.json"
    assert cli.main(["convert", str(saved), str(names), "--suggest"]) == 1
    assert "unsure: layers.{i}.up.weight" in capfd.readouterr().err
    values = json.loads(names.read_text("utf-8"))
    both = {f"params.tower.{{i}}.ffn.{which}" for which in ("alpha", "beta")}
    assert values["unsure"].keys() == {"layers.{i}.up.weight"}
    assert {*values["unsure"]["layers.{i}.up.weight"]["gate"]} == both
    with pytest.raises(BadModelConfig, match="decide about each entry"):
        convert_checkpoint(saved, tmp_path / "new", names_file=names)
    # The user's decision.
    values["names"]["layers.{i}.up.weight"]["name"] = [
        {"name": "params.tower.{i}.ffn.alpha", "axes": "H F"},
        {"name": "params.tower.{i}.ffn.beta", "axes": "H F"},
    ]
    del values["unsure"]
    names.write_text(json.dumps(values), "utf-8")
    convert_checkpoint(saved, tmp_path / "new", names_file=names)
    assert tokens(tmp_path / "new") == tokens(GOLDEN / "llama-grouped")


def test_what_is_left_over_is_unsure() -> None:
    tree = by_layer("llama-grouped", 10) | {"adapter": {"scale": np.zeros(3, np.float32)}}
    found = suggested(tree)
    assert found.unsure == {"ignore": ["adapter.scale"]}


def test_what_is_missing_is_unsure() -> None:
    tree = by_layer("llama-grouped", 10)
    for layer in tree["tower"].values():
        del layer["ffn"]["down"]
    assert "no array found for down" in suggested(tree).unsure["layers.{i}.down.weight"]


def test_square_matrices_follow_the_others() -> None:
    """Where H is N D, a matrix fits both ways; the others decide, and without any it is unsure."""
    directory = GOLDEN / "gpt2-tied-gelu-new"
    model, _ = described_model(directory)
    assert model.hidden_size == model.n_heads * model.head_size == 64
    h, f = model.hidden_size, model.feed_forwards[0].size
    layer: dict[str, tuple[int, ...]] = {
        **{f"attn.{name}.kernel": (h, h) for name in ("q", "k", "v", "out")},
        **{f"attn.{name}.bias": (h,) for name in ("q", "k", "v", "out")},
        **{"mlp.up.kernel": (h, f), "mlp.up.bias": (f,), "mlp.down.kernel": (f, h), "mlp.down.bias": (h,)},
        **{f"ln_{n}.{kind}": (h,) for n in (1, 2) for kind in ("scale", "bias")},
    }
    outside = {
        "wte": (model.vocab_size, h),
        "wpe": (model.n_positions, h),
        "ln_f.scale": (h,),
        "ln_f.bias": (h,),
    }

    def entries(layer: Mapping[str, tuple[int, ...]]) -> SuggestedNames:
        each = {f"h.{i}.{name}": shape for i in range(model.n_layers) for name, shape in layer.items()}
        return match_names(model, {**outside, **each})

    found = entries(layer)
    assert not found.unsure
    assert [part["axes"] for part in found.values["names"]["layers.{i}.qkv.weight"]["name"]] == [
        *("H ND", "H KD", "H KD")
    ]
    assert found.values["names"]["layers.{i}.out.weight"]["axes"] == "ND H"
    turned = {name: shape[::-1] for name, shape in layer.items()}
    found = entries(turned)
    assert not found.unsure
    assert found.values["names"]["layers.{i}.out.weight"]["axes"] == "H ND"
    mixed = layer | {"mlp.up.kernel": (f, h)}
    assert "out, axes" in entries(mixed).unsure["layers.{i}.out.weight"]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no Orbax checkpoint"):
        suggest_names(GOLDEN / "llama-grouped")
    with pytest.raises(ConfigError, match="takes no file of names"):
        convert_checkpoint(GOLDEN / "llama-grouped", tmp_path / "new", names_file=tmp_path / "names.json")
    with pytest.raises(UnsupportedModel, match="decoders alone"):
        match_names(described_model(GOLDEN / "bart-bare")[0], {})
    (tmp_path / "there").write_text("", "utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        SuggestedNames({}).write(tmp_path / "there")
