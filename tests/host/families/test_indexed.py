"""Families whose attention sees the keys that an indexer selects: their fields, refusals, names and sizes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import ParallelConfig
from orca_jax.errors import BadModelConfig, ConfigError, UnsupportedModel
from orca_jax.families.attention_config import Attention, Indexer, Latent, latent_attention
from orca_jax.families.hf_config import read_config
from orca_jax.families.mixtures.indexed import DEEPSEEK_V32, GLM_MOE_DSA
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.next_token import next_token_model
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import layer_parameters, packable_weights, parameter_table
from orca_jax.families.presets import PRESETS
from orca_jax.families.rotary import Rotary
from orca_jax.planning.stage_layers import check_split

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "kv_lora_rank": 24,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 10,
    "vocab_size": 96,
}
V32, GLM = SMALL | {"model_type": "deepseek_v32"}, SMALL | {"model_type": "glm_moe_dsa"}


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return read_config(tmp_path)


def sparse(model: ModelConfig) -> list[int]:
    return [i for i, layer in enumerate(model.layers) if layer.experts is not None]


def test_the_defaults_are_transformers(tmp_path: Path) -> None:
    model = read(tmp_path, V32)
    assert model.attention.indexer == Indexer(n_heads=64, head_size=128, top_k=2048, interleaved=False)
    assert model.attention.rotary is not None and model.attention.rotary.interleaved
    assert sparse(model) == [3] and model.layers[0].norm.eps == 1e-6
    assert model.layers[3].experts is not None and model.layers[3].experts.multiplier == 2.5
    glm = read(tmp_path, GLM)
    assert glm.attention.indexer == Indexer(n_heads=32, head_size=128, top_k=2048, interleaved=True)
    assert sparse(glm) == [3] and glm.layers[0].norm.eps == 1e-5


@pytest.mark.parametrize("config", [V32, GLM])
def test_the_fields_of_a_file(config: dict[str, Any], tmp_path: Path) -> None:
    changes = {"index_n_heads": 6, "index_head_dim": 12, "index_topk": 9}
    own = read(tmp_path, config, **changes, layer_types=["indexed_attention"] * 4).attention
    assert own.indexer is not None
    assert (own.indexer.n_heads, own.indexer.head_size, own.indexer.top_k) == (6, 12, 9)
    assert own.indexer.scale == pytest.approx(12**-0.5 * 6**-0.5)
    # A token's compressed vector, the rotated part of its key, and its index key.
    assert own.cached_width == 24 + 8 + 12
    kinds = ["sparse", "dense", "dense", "sparse"]
    assert sparse(read(tmp_path, config, mlp_layer_types=kinds)) == [0, 3]
    assert sparse(read(tmp_path, config, first_k_dense_replace=1)) == [1, 2, 3]


def shared(model: ModelConfig) -> list[int]:
    return [i for i, layer in enumerate(model.layers) if layer.takes_selection]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"indexer_types": ["full"] * 4}, []),
        ({"indexer_types": ["full", "shared", "full", "shared"], "index_topk_freq": 9}, [1, 3]),
        ({"index_topk_pattern": "FFSS"}, [2, 3]),
        ({"index_topk_pattern": ["full", "shared", "shared", "full"]}, [1, 2]),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 1}, []),
        ({"index_topk_freq": 3}, [2, 3]),  # the offset is 2
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True}, [3]),
    ],
)
def test_layers_that_share_what_an_earlier_one_selects(
    fields: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    model = read(tmp_path, GLM, **fields)
    assert shared(model) == expected
    assert [model.selection_of(i) for i in range(4)] == [
        max(j for j in range(i + 1) if j not in expected) for i in range(4)
    ]
    names = {name.partition(".index_")[0] for name in parameter_table(model) if ".index_" in name}
    assert names == {f"layers.{i}" for i in range(4) if i not in expected}
    # An index key takes 128 numbers in a layer that selects.
    widths = [attention.cached_width for attention in model.attentions]
    assert widths == [24 + 8 + 128 * (i not in expected) for i in range(4)]
    written = GLM_MOE_DSA.write(model)
    assert written is not None and written["indexer_types"].count("shared") == len(expected)


@pytest.mark.parametrize(
    "kinds", [["shared", "full", "full", "full"], ["full"] * 3, ["full", "full", "full", "half"]]
)
def test_layers_that_share_with_none_before_them(kinds: list[str], tmp_path: Path) -> None:
    with pytest.raises(BadModelConfig, match="indexer_types: expected 4 of full, shared, the first full"):
        read(tmp_path, GLM, indexer_types=kinds)


@pytest.mark.parametrize("name", ["bamba-grouped", "lfm2-recurrent-last", "llama-grouped"])
def test_layers_without_an_indexer_take_no_selection(name: str) -> None:
    model = read_config(GOLDEN / name)
    assert [model.selection_of(i) for i in range(model.n_layers)] == [*range(model.n_layers)]
    check_split(model, ParallelConfig(pipeline_parallel=2))


def test_stages_and_heads_that_lack_a_selection_are_refused(tmp_path: Path) -> None:
    model = read(tmp_path, GLM, indexer_types=["full", "full", "shared", "shared"])
    check_split(model, ParallelConfig(pipeline_parallel=1))
    with pytest.raises(
        ConfigError, match="layer 2 takes the keys that layer 1 selects, which would be on an"
    ):
        check_split(model, ParallelConfig(pipeline_parallel=2))
    with pytest.raises(ConfigError, match="last layer takes the keys that an earlier layer selects"):
        next_token_model(model)
    taking = model.layers[3]
    with pytest.raises(ConfigError, match="the first layer takes the keys that an earlier layer selected"):
        replace(model, layers=(taking, taking))
    own = model.layers[0].attention
    assert own is not None and own.indexer is not None
    other = model.layers[0].with_attention(indexer=replace(own.indexer, top_k=9))
    with pytest.raises(ConfigError, match="layers with different indexers, or with and without one"):
        replace(model, layers=(model.layers[0], other))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (V32, {"rope_interleave": False}, "rope_interleave: expected true, found false"),
        (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave: expected false, found true"),
        (GLM, {"indexer_rope_interleave": False}, "indexer_rope_interleave: expected true, found false"),
        (GLM, {"layer_types": ["full_attention"] * 4}, "layer_types: only indexed_attention is supported"),
        (V32, {"q_lora_rank": None}, r"an indexer needs latent attention with compressed queries"),
        (GLM, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        (V32, {"index_head_dim": 6}, "index_head_dim is 6; it must be at least the 8 elements"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModel, BadModelConfig), match=message):
        read(tmp_path, config, **changes)


def test_the_kinds_of_layers_must_be_as_many_as_layers(tmp_path: Path) -> None:
    with pytest.raises(BadModelConfig, match="mlp_layer_types: expected 4 of dense, sparse"):
        read(tmp_path, GLM, mlp_layer_types=["dense", "sparse"])


@pytest.mark.parametrize(("family", "preset"), [(DEEPSEEK_V32, "deepseek-v3.2"), (GLM_MOE_DSA, "glm-5")])
def test_the_names_and_shapes_of_an_indexers_weights(family: Any, preset: str) -> None:
    model = PRESETS[preset]
    indexer, latent = model.attention.indexer, model.attention.latent
    assert indexer is not None and latent is not None and latent.query_rank is not None
    prefix = "model.layers.5.self_attn.indexer."
    shapes = {name: parameter.shape for name, parameter in layer_parameters(model, 5).items()}
    found = {
        family.stored_name(f"layers.5.{name}", "model.", model).names[0]: shapes[name]
        for name in shapes
        if name.startswith("index_")
    }
    assert found == {
        f"{prefix}wq_b.weight": (indexer.n_heads * 128, latent.query_rank),
        f"{prefix}wk.weight": (128, model.hidden_size),
        f"{prefix}k_norm.weight": (128,),
        f"{prefix}k_norm.bias": (128,),
        f"{prefix}weights_proj.weight": (indexer.n_heads, model.hidden_size),
    }


def test_every_device_holds_the_indexer_whole_and_one_of_its_matrices_is_never_packed() -> None:
    model = PRESETS["deepseek-v3.2"]
    table = parameter_table(model)
    names = [name for name in table if name.startswith("layers.3.index_")]
    assert len(names) == 5 and all(table[name].local_shape(8) == table[name].shape for name in names)
    packable = {name for name in packable_weights(model) if name.startswith("layers.3.index_")}
    assert packable == {"layers.3.index_q.weight", "layers.3.index_k.weight"}


def test_an_indexer_needs_latent_attention() -> None:
    indexer = Indexer(n_heads=2, head_size=8, top_k=4)
    with pytest.raises(ConfigError, match="an indexer needs latent attention"):
        Attention(n_heads=2, n_kv_heads=2, head_size=8, indexer=indexer)
    with pytest.raises(ConfigError, match="the norm of index keys must be a LayerNorm with a bias"):
        replace(indexer, norm=Norm(kind="rms_norm"))
    latent = Latent(rank=8, rotary_size=4, plain_size=6, value_size=5, query_rank=7)
    own = latent_attention(latent, n_heads=2, rotary=Rotary(size=4), indexer=indexer)
    assert own.repeated(2).cached_width == 2 * (8 + 4 + 8)  # each of two devices has all of it
