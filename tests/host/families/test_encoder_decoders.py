"""config.json of published models with an encoder: their shape, their size, and a way back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import UnsupportedModel
from orca_jax.families.attention_config import RelativeBias
from orca_jax.families.hf_config import hf_config_of, read_config
from orca_jax.families.model_config import LearnedPositions, ModelConfig
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.presets import PRESETS

Config = dict[str, Any]


def _t5(hidden: int, size: int, inner: int, heads: int, layers: int, **other: Any) -> Config:
    """T5's config.json as on the hub, without the fields that its classes have by default."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "d_ff": inner,
        "d_kv": size,
        "d_model": hidden,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "n_positions": 512,
        "num_heads": heads,
        "num_layers": layers,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"num_beams": 4, "prefix": "summarize: "}},
        "use_cache": True,
        "vocab_size": 32128,
        **other,
    }


def _flan(hidden: int, inner: int, heads: int, layers: int, **other: Any) -> Config:
    return _t5(hidden, 64, inner, heads, layers) | {
        "feed_forward_proj": "gated-gelu",
        "num_decoder_layers": layers,
        "tie_word_embeddings": False,
        **other,
    }


def _bart(model_type: str, classes: str, vocab: int, layers: int, hidden: int, **other: Any) -> Config:
    return {
        "activation_dropout": 0.1,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": [classes],
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "classif_dropout": 0.1,
        "d_model": hidden,
        "decoder_attention_heads": 16,
        "decoder_ffn_dim": 4 * hidden,
        "decoder_layerdrop": 0.0,
        "decoder_layers": layers,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "early_stopping": True,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4 * hidden,
        "encoder_layerdrop": 0.0,
        "encoder_layers": layers,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "forced_bos_token_id": 0,
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_position_embeddings": 1024,
        "model_type": model_type,
        "no_repeat_ngram_size": 3,
        "normalize_before": False,
        "num_beams": 4,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "scale_embedding": False,
        "use_cache": True,
        "vocab_size": vocab,
        **other,
    }


T5_SMALL = _t5(512, 64, 2048, 8, 6)
FLAN_XL = _flan(2048, 5120, 32, 24)
MT5_SMALL = _flan(512, 1024, 6, 8) | {
    "architectures": ["MT5ForConditionalGeneration"],
    "model_type": "mt5",
    "tokenizer_class": "T5Tokenizer",
    "vocab_size": 250112,
}
UMT5_SMALL = MT5_SMALL | {
    "architectures": ["UMT5ForConditionalGeneration"],
    "model_type": "umt5",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "relative_attention_max_distance": 128,
    "scalable_attention": True,
    "vocab_size": 256384,
}
BART_LARGE = _bart("bart", "BartModel", 50265, 12, 1024)
MBART_LARGE = _bart("mbart", "MBartForConditionalGeneration", 250027, 12, 1024) | {
    "add_final_layer_norm": True,
    "decoder_start_token_id": None,
    "forced_bos_token_id": None,
    "normalize_before": True,
    "normalize_embedding": True,
    "output_past": True,
    "scale_embedding": True,
    "static_position_embeddings": False,
}
PEGASUS_XSUM = _bart("pegasus", "PegasusForConditionalGeneration", 96103, 16, 1024) | {
    "activation_function": "relu",
    "add_final_layer_norm": True,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "extra_pos_embeddings": 1,
    "force_bos_token_to_be_generated": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": 1,
    "length_penalty": 0.6,
    "max_position_embeddings": 512,
    "normalize_before": True,
    "normalize_embedding": False,
    "num_beams": 8,
    "pad_token_id": 0,
    "scale_embedding": True,
    "static_position_embeddings": True,
}
# The number of parameters that transformers counts.
PUBLISHED = {
    "t5-small": (T5_SMALL, 60_506_624),
    "t5-base": (_t5(768, 64, 3072, 12, 12), 222_903_552),
    "t5-large": (_t5(1024, 64, 4096, 16, 24), 737_668_096),
    "t5-3b": (_t5(1024, 128, 16384, 32, 24), 2_851_598_336),
    "t5-11b": (_t5(1024, 128, 65536, 128, 24), 11_307_321_344),
    "flan-t5-xl": (FLAN_XL, 2_849_757_184),
    "mt5-small": (MT5_SMALL, 300_176_768),
    "umt5-small": (UMT5_SMALL, 306_601_984),
    "bart-large": (BART_LARGE, 406_291_456),
    "mbart-large-cc25": (MBART_LARGE, 610_851_840),
    "pegasus-xsum": (PEGASUS_XSUM, 569_748_480),
}


def n_parameters(model: ModelConfig) -> int:
    """The number of parameters as transformers counts them.

    A shared relative bias counts once for each side, and the bias of the logits does not count.
    """
    shapes = parameter_shapes(model)
    relative = model.attention.scores.relative
    once = relative is not None and relative.shared
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name != "head.bias" and not (once and name.endswith("relative_bias") and "layers.0." not in name)
    )


def _read(directory: Path, config: Config) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_size_and_a_way_back(tmp_path: Path, name: str) -> None:
    config, n_elements = PUBLISHED[name]
    model = _read(tmp_path, config)
    assert n_parameters(model) == n_elements
    assert _read(tmp_path, hf_config_of(model)) == model
    if name in PRESETS:
        assert model == PRESETS[name]


def test_every_preset_with_an_encoder_is_published() -> None:
    assert {name for name, model in PRESETS.items() if model.encoder} <= PUBLISHED.keys()


def test_the_shape_of_t5(tmp_path: Path) -> None:
    model = _read(tmp_path, T5_SMALL)
    assert model.encoder is not None
    layer, encoding = model.layers[0], model.encoder.layers[0]
    assert (model.n_layers, len(model.encoder.layers)) == (6, 6)
    assert (model.n_positions, model.encoder.n_positions) == (2048, 2048)
    assert model.embedding.tied and model.logit_multiplier == 512**-0.5
    assert encoding.attention is not None
    assert model.attention.causal and not encoding.attention.causal
    assert layer.cross is not None and not layer.cross.causal
    assert model.attention.scores.relative == RelativeBias(n_buckets=32, max_distance=128, shared=True)
    assert layer.cross.scores.relative is None and layer.cross.scale == model.attention.scale == 1.0
    assert model.feed_forward.activation == "relu" and not model.feed_forward.gated
    assert (model.decoder_start_token_id, model.eos_token_ids, model.bos_token_id) == (0, (1,), None)


def test_other_spellings_of_a_t5(tmp_path: Path) -> None:
    flan = _read(tmp_path, FLAN_XL)
    assert not flan.embedding.tied and flan.logit_multiplier == 1.0
    assert flan.feed_forward.gated and flan.feed_forward.activation == "gelu_tanh"
    newer = FLAN_XL | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert _read(tmp_path, newer) == flan
    general = {key: value for key, value in T5_SMALL.items() if not key.startswith(("d_m", "num_"))}
    general |= {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    assert _read(tmp_path, general) == _read(tmp_path, T5_SMALL)
    assert _read(tmp_path, T5_SMALL | {"decoder_start_token_id": None}) == _read(tmp_path, T5_SMALL)
    fewer = _read(tmp_path, T5_SMALL | {"num_decoder_layers": 2})
    assert (fewer.n_layers, len(fewer.encoder.layers if fewer.encoder else ())) == (2, 6)


def test_which_heads_and_scales_mt5_and_umt5_have(tmp_path: Path) -> None:
    for config, scaled in ((MT5_SMALL, 1.0), (UMT5_SMALL, 512**-0.5)):
        assert _read(tmp_path, config).logit_multiplier == 1.0
        tied = _read(tmp_path, config | {"tie_word_embeddings": True})
        assert tied.logit_multiplier == scaled and not tied.embedding.tied
    relative = _read(tmp_path, UMT5_SMALL).attention.scores.relative
    assert relative is not None and not relative.shared


def test_the_shape_of_bart(tmp_path: Path) -> None:
    model = _read(tmp_path, BART_LARGE)
    assert model.encoder is not None
    assert model.positions == model.encoder.positions == LearnedPositions(offset=2)
    assert {layer.residual for layer in (*model.layers, *model.encoder.layers)} == {"post"}
    assert model.embedding.norm is not None and model.encoder.embedding_norm is not None
    assert model.final_norm is None and model.encoder.final_norm is None
    assert model.head_bias and model.embedding.tied and model.embedding.multiplier == 1.0
    assert (model.forced_bos_token_id, model.forced_eos_token_id) == (0, 2)
    older = {key: value for key, value in BART_LARGE.items() if key != "forced_bos_token_id"}
    assert _read(tmp_path, older | {"force_bos_token_to_be_generated": True}) == model


def test_the_shapes_of_its_relatives(tmp_path: Path) -> None:
    mbart, pegasus = _read(tmp_path, MBART_LARGE), _read(tmp_path, PEGASUS_XSUM)
    for model in (mbart, pegasus):
        assert model.encoder is not None
        assert {layer.residual for layer in (*model.layers, *model.encoder.layers)} == {"pre"}
        assert model.final_norm is not None and model.encoder.final_norm is not None
        assert model.embedding.multiplier == 32.0
    assert mbart.embedding.norm is not None and pegasus.embedding.norm is None
    assert mbart.decoder_start_token_id == 0  # bos, where no file says another
    assert pegasus.positions == LearnedPositions() and pegasus.n_positions == 512


def test_models_of_no_family_are_not_written(tmp_path: Path) -> None:
    model = _read(tmp_path, T5_SMALL)
    for other in (
        replace(model, n_positions=100),
        replace(model, logit_multiplier=0.5),
        replace(model, layers=(*model.layers[:-1], replace(model.layers[0], residual_multiplier=0.5))),
    ):
        with pytest.raises(UnsupportedModel, match=r"no config\.json of .*T5.* can describe this"):
            hf_config_of(other)
