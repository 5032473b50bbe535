"""Adapters in PEFT's format as they are read: hostile ones are refused by name.

tests/whole/adapters compares what is computed with PEFT.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax.checkpoint.peft import LoadedAdapter, extras_in, read_adapter
from orca_jax.checkpoint.safetensors_reader import read_header
from orca_jax.checkpoint.shard_reader import read_box
from orca_jax.errors import BadAdapter, CheckpointError, CorruptFile, NotACheckpoint, UnsafeFile
from orca_jax.families.hf_config import read_hf_config
from tests.device.checkpoint.tiny_checkpoint import write_json, write_tensors
from tests.device.model.golden import DIRECTORY as MODELS
from tests.places import DATA

SOURCE = DATA / "adapters" / "llama-grouped" / "all"  # of rank 4, for all linear layers
MODEL = read_hf_config(MODELS / "llama-grouped")
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def read(directory: Path, *, most_rank: int = 16) -> LoadedAdapter:
    return read_adapter(directory, MODEL.family, MODEL.model, np.dtype(np.float32), most_rank=most_rank)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A directory, and the config and the tensors of a good adapter."""
    header = read_header(SOURCE / "adapter_model.safetensors")
    tensors = {name: read_box(one, tuple((0, n) for n in one.shape)) for name, one in header.items()}
    return tmp_path, json.loads((SOURCE / "adapter_config.json").read_text()), tensors


def write(files: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> Path:
    directory, config, tensors = files
    write_json(directory / "adapter_config.json", config)
    write_tensors(directory / "adapter_model.safetensors", tensors)
    return directory


def test_parts_are_the_products_of_their_tensors(files: Any) -> None:
    """`v_proj` is the last slice of `qkv`, whose heads have our order; alpha / r is 2 in this adapter."""
    loaded = read(write(files))
    assert loaded.rank == 4
    _, _, tensors = files
    low = loaded.changes["layers.1.qkv.weight"][2]
    assert low is not None and low.b.shape == (1, 20, 4)
    a, b = (tensors[f"base_model.model.model.layers.1.self_attn.v_proj.lora_{side}.weight"] for side in "AB")
    np.testing.assert_allclose(low.b[0] @ low.a, 2 * (b @ a), rtol=1e-5)


def set_field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda files: files[1].update({name: value})


def set_tensor(name: str, value: Any) -> Callable[[Any], None]:
    return lambda files: files[2].update({name: np.asarray(value, np.float32)})


ONES = np.ones((4, 48), np.float32)
HOSTILE: list[tuple[Callable[[Any], Any], str]] = [
    (set_field("use_dora", True), "use_dora True: not supported"),
    (set_field("bias", "lora_only"), "bias lora_only: not supported"),
    (set_field("modules_to_save", ["lm_head"]), "modules_to_save .*: not supported"),
    (set_field("trainable_token_indices", [1]), "trainable_token_indices .*: not supported"),
    (set_field("a_new_option", 3), "a_new_option 3: not supported"),
    (set_field("peft_type", "IA3"), "peft_type: expected 'LORA', found IA3"),
    (set_field("init_lora_weights", "pissa_niter_4"), "pissa_niter_4 changes the model's own weights"),
    (set_field("r", 17), "the rank is 17, and the engine has room for 16; .*--max-lora-rank 17"),
    (set_field("r", 0), "r: expected 1 to 4096, found 0"),
    (set_field("r", 3), r"expected the shape \[3, 80\], found \[4, 80\]"),
    (set_field("lora_alpha", "x"), "lora_alpha: expected a number, found x"),
    (set_field("rank_pattern", {"q_proj": 17}), "the rank is 17"),
    (set_field("rank_pattern", {"(a*)*": 1}), "other regular expressions are not read"),
    (set_field("alpha_pattern", [1]), "alpha_pattern: expected an object"),
    (set_tensor(Q.format("A"), np.ones((4, 47))), r"expected the shape \[4, 48\], found \[4, 47\]"),
    (set_tensor(Q.format("B"), np.full((60, 4), np.nan)), "q_proj.lora_B.* holds NaN or infinite numbers"),
    (set_tensor(Q.format("A"), np.full((4, 48), np.inf)), "q_proj.lora_A.* holds NaN or infinite numbers"),
    (set_tensor("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", ONES), "only one of lora_A"),
    (set_tensor("base_model.model.lm_head.lora_A.weight", ONES), "only one of lora_A"),
    (set_tensor("base_model.model.model.embed_tokens.lora_embedding_A", ONES), "only one of lora_A"),
    (set_tensor("base_model.model.model.embed_tokens.base_layer.weight", ONES), "a resized vocabulary"),
    (set_tensor("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", ONES), "no such name"),
    (set_tensor("base_model.model.lm_head.weight", ONES), "found no such name"),
    (set_tensor(Q.format("magnitude_vector"), ONES), "found no such name"),
]


@pytest.mark.parametrize(("change", "complaint"), HOSTILE, ids=[str(i) for i in range(len(HOSTILE))])
def test_a_hostile_adapter_is_refused_by_name(
    files: Any, change: Callable[[Any], Any], complaint: str
) -> None:
    change(files)
    with pytest.raises(BadAdapter, match=complaint) as refused:
        read(write(files))
    assert str(files[0]) in str(refused.value)


@pytest.mark.parametrize(
    "module",
    ["model.layers.9.mlp.up_proj", "head", "model.layers.0.mlp.router", "model.embed_tokens"],
)
def test_a_module_that_is_not_there(files: Any, module: str) -> None:
    files[2].update({f"base_model.model.{module}.lora_{side}.weight": ONES for side in "AB"})
    with pytest.raises(BadAdapter, match=r"the model has no linear layer .* that an adapter can change"):
        read(write(files))


def test_experts_by_their_names_are_those_of_one_parameter(tmp_path: Path) -> None:
    """PEFT saves the parameters of all experts; other trainers each expert's linear layers."""
    model, dtype = read_hf_config(MODELS / "mixtral-grouped"), np.dtype(np.float32)
    family, config, experts = model.family, model.model, ("experts",)
    source = DATA / "adapters" / "mixtral-grouped" / "experts"
    fused = read_adapter(source, family, config, dtype, most_rank=16, extras=experts)
    tensors = dict[str, np.ndarray]()
    for name, parts in fused.changes.items():
        stored = family.stored_name(name, "base_model.model.model.", config).names
        for i, low in enumerate(parts):
            for x in range(len(low.a) if low is not None and "experts" in name else 0):
                assert low is not None
                module = stored[x * len(parts) + i].removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"] = low.a[x]
                tensors[f"{module}.lora_B.weight"] = low.b[x].reshape(-1, low.rank)
    assert len(tensors) == 2 * 3 * 8 * config.n_layers, "two matrices of three linear layers of 8 experts"
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "r": 3, "lora_alpha": 3})
    write_tensors(tmp_path / "adapter_model.safetensors", tensors)
    named = read_adapter(tmp_path, family, config, dtype, most_rank=16, extras=experts)
    assert named.changes.keys() == {name for name in fused.changes if "experts" in name}
    for name, parts in named.changes.items():
        for one, other in zip(parts, fused.changes[name], strict=True):
            assert one is not None and other is not None
            np.testing.assert_array_equal(one.a, other.a)
            np.testing.assert_array_equal(one.b, other.b)
    assert extras_in(tmp_path, family, config) == extras_in(source, family, config) == {"experts"}
    with pytest.raises(
        BadAdapter, match=r"changes experts, for which .* has no room; .*--lora-extras experts"
    ):
        read_adapter(tmp_path, family, config, dtype, most_rank=16)


def test_ranks_of_experts_are_those_of_their_parameters(files: Any) -> None:
    """PEFT names them so in the patterns that it makes of a mixture's `gate_proj` and `up_proj`."""
    model, dtype = read_hf_config(MODELS / "mixtral-grouped"), np.dtype(np.float32)
    source = DATA / "adapters" / "mixtral-grouped" / "experts"
    whole = read_adapter(source, model.family, model.model, dtype, most_rank=16, extras=["experts"])
    config = json.loads((source / "adapter_config.json").read_text())
    ranks = {r".*\.gate_up_proj": 3, "experts.down_proj": 3, "q_proj": 3}
    alphas = dict.fromkeys(ranks, 5)
    write_json(
        files[0] / "adapter_config.json",
        config | {"r": 9, "rank_pattern": ranks, "lora_alpha": 1, "alpha_pattern": alphas},
    )
    shutil.copy(source / "adapter_model.safetensors", files[0])
    again = read_adapter(files[0], model.family, model.model, dtype, most_rank=16, extras=["experts"])
    for name, parts in whole.changes.items():
        for one, other in zip(parts, again.changes[name], strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                np.testing.assert_array_equal(one.b, other.b)


def test_square_experts_need_a_version_that_says_the_side(files: Any) -> None:
    """A layer of gpt-oss has as many inputs as outputs."""
    config = json.loads((MODELS / "gpt-oss-yarn" / "config.json").read_text())
    write_json(files[0] / "config.json", config | {"intermediate_size": config["hidden_size"]})
    model, dtype = read_hf_config(files[0]), np.dtype(np.float32)
    n, size, chance = config["num_local_experts"], config["hidden_size"], np.random.default_rng(3)
    name = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"
    a, b = (chance.standard_normal(shape).astype(np.float32) for shape in ((n * 2, size), (size, n * 2)))
    write_tensors(files[0] / "adapter_model.safetensors", {name.format("A"): a, name.format("B"): b})

    def loaded(version: str) -> LoadedAdapter:
        fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "peft_version": version}
        write_json(files[0] / "adapter_config.json", fields)
        return read_adapter(files[0], model.family, model.model, dtype, most_rank=2, extras=["experts"])

    (down,) = loaded("0.21.2").changes["layers.0.experts.down.weight"]
    assert down is not None
    for expert in range(n):
        whole = b[:, expert::n] @ a[2 * expert : 2 * expert + 2]
        np.testing.assert_allclose(down.b[expert] @ down.a[expert], whole, atol=1e-5)
    with pytest.raises(BadAdapter, match=r"several matrices .* have these sizes.* PEFT 0\.19 or later"):
        loaded("0.18.1")


def test_files_that_are_missing_cut_or_pickles(files: Any) -> None:
    directory = write(files)
    whole = (directory / "adapter_model.safetensors").read_bytes()
    (directory / "adapter_model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match=r"adapter_model\.safetensors"):
        read(directory)
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(UnsafeFile, match="is a pickle"):
        read(directory)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(NotACheckpoint, match=r"adapter_model\.safetensors"):
        read(directory)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read(directory)
