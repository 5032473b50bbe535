"""A Hugging Face config.json becomes a ModelConfig, and the JSON files beside it are held against it.

GPT-2 and OPT are read. An option that changes what is computed, and that we do not compute, is refused; one
that matters to training alone (dropout), or changes only how it is computed (`use_cache`, `torch_dtype`;
`reorder_and_upcast_attn`, which keeps the softmax in float32, as we always do), is passed over. A size that
is missing is an error rather than the architecture's default.
"""

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orca_jax.errors import BadModelConfig, ConfigError, NotACheckpoint, UnsupportedModel
from orca_jax.families.model_config import Activation, ModelConfig
from orca_jax.families.strict_json import read_object, shown

ModelType = Literal["gpt2", "opt"]

_MAX_CONFIG_BYTES = 1_000_000
_MAX_TOKENIZER_BYTES = 100_000_000

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same formula with its constant cut to ten digits
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu": "gelu",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class HFConfig:
    """The model's shape, and what only the reader of its tensors needs: whose names they have."""

    path: Path
    model_type: ModelType
    model: ModelConfig


def read_config(directory: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face style directory; errors as `read_hf_config`."""
    return read_hf_config(Path(directory)).model


def read_hf_config(directory: Path) -> HFConfig:
    """Read config.json, and generation_config.json and tokenizer.json where they stand beside it.

    Raises NotACheckpoint (no config.json), CorruptFile (not JSON), BadModelConfig (a value that is missing,
    of the wrong type or absurd, or two files that disagree) and UnsupportedModel; each names the file.
    """
    path = directory / "config.json"
    if not os.path.exists(path):
        raise NotACheckpoint(f"{shown(directory)} has no config.json, so it is not a checkpoint's directory")
    fields = _Fields(path, read_object(path, _MAX_CONFIG_BYTES))
    model_type = fields.text("model_type", "")
    if model_type not in _READERS:
        raise UnsupportedModel(
            f"{shown(path)}: model_type: expected one of {', '.join(_READERS)}, found '{shown(model_type)}'"
        )
    reader = _READERS[model_type]
    _refuse_other_models(fields, reader.architectures)
    try:
        model = reader.read(fields)
    except ConfigError as error:
        # The message speaks of our names; a reader of config.json looks for its own.
        message = re.sub(r"\w+", lambda word: reader.names.get(word[0], word[0]), str(error))
        raise BadModelConfig(f"{shown(path)}: {shown(message)}") from error
    model = _with_generation_config(model, path, directory / "generation_config.json")
    check_tokenizer(model, path, directory / "tokenizer.json")
    return HFConfig(path, reader.model_type, model)


class _Fields:
    """The values of a config file, taken by name and checked by type. JSON's null is as good as absent."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def _bad(self, name: str, rule: str) -> BadModelConfig:
        return BadModelConfig(
            f"{shown(self.path)}: {name}: expected {rule}, found {shown(self._values.get(name))}"
        )

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def whole(self, name: str, alias: str = "", default: int | None = None) -> int:
        """A whole number under its name, or under the general one that transformers takes for it too."""
        if self.raw(alias) is not None:
            if self.raw(name) is not None and self.raw(name) != self.raw(alias):
                raise BadModelConfig(
                    f"{shown(self.path)} disagrees with itself: {name} is {shown(self.raw(name))}, "
                    f"{alias} is {shown(self.raw(alias))}"
                )
            name = alias
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(name, "a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
            raise self._bad(name, "a number")  # which an infinity, or an integer of 400 digits, is not
        return value

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._bad(name, "text")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """One token id or a list of them; None where the file says nothing."""
        value = self.raw(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not 1 <= len(ids) <= 1024 or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def activation(self, default: str) -> Activation:
        name = self.text("activation_function", default)
        if name not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"{shown(self.path)}: activation_function: expected one of {', '.join(_ACTIVATIONS)}, "
                f"found '{shown(name)}'"
            )
        return _ACTIVATIONS[name]

    def must_be(self, name: str, value: bool, meaning: str) -> None:
        """Refuse an option that changes what is computed."""
        if self.flag(name, value) is not value:
            raise UnsupportedModel(
                f"{shown(self.path)}: {name}: expected {str(value).lower()}, found {str(not value).lower()}; "
                f"{meaning} is not supported"
            )

    def special_ids(self) -> dict[str, Any]:
        bos = self.token_ids("bos_token_id")
        return {
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": self.token_ids("eos_token_id") or (),
        }


def _refuse_other_models(fields: _Fields, architectures: tuple[str, ...]) -> None:
    """A model_type may be worn by a classifier, by a quantized model, or by code of its own."""
    found = fields.raw("architectures")
    if found is not None:
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise BadModelConfig(
                f"{shown(fields.path)}: architectures: expected a list of names, found {shown(found)}"
            )
        if found and not set(found) & set(architectures):
            raise UnsupportedModel(
                f"{shown(fields.path)}: architectures: expected one of {', '.join(architectures)}, "
                f"found {shown(found)}"
            )
    for name, meaning in (
        ("quantization_config", "a quantized model"),
        ("auto_map", "a model with code of its own"),
        ("pruned_heads", "a model with heads cut out"),
    ):
        if fields.raw(name):
            raise UnsupportedModel(f"{shown(fields.path)}: {name} is set: {meaning} is not supported")
    fields.must_be("is_encoder_decoder", False, "an encoder")


def _gpt2(fields: _Fields) -> ModelConfig:
    fields.must_be("scale_attn_weights", True, "attention without the scale of 1 / sqrt(head size)")
    fields.must_be("scale_attn_by_inverse_layer_idx", False, "attention scaled by the layer's number")
    fields.must_be("add_cross_attention", False, "cross attention")
    hidden_size = fields.whole("n_embd", "hidden_size")
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("n_positions", "max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("n_layer", "num_hidden_layers"),
        n_heads=fields.whole("n_head", "num_attention_heads"),
        ffn_size=fields.whole("n_inner", default=4 * hidden_size),
        activation=fields.activation("gelu_new"),
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.special_ids(),
    )


def _opt(fields: _Fields) -> ModelConfig:
    fields.must_be("layer_norm_elementwise_affine", True, "LayerNorm without weights")
    hidden_size = fields.whole("hidden_size")
    embedding_size = fields.whole("word_embed_proj_dim", default=hidden_size)
    if embedding_size < 1:  # 0 would mean the hidden size to ModelConfig
        raise ConfigError(f"embedding_size is {embedding_size}; it must be at least 1")
    norm_first = fields.flag("do_layer_norm_before", True)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        n_positions=fields.whole("max_position_embeddings"),
        hidden_size=hidden_size,
        n_layers=fields.whole("num_hidden_layers"),
        n_heads=fields.whole("num_attention_heads"),
        ffn_size=fields.whole("ffn_dim"),
        activation=fields.activation("relu"),
        norm="pre" if norm_first else "post",
        final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
        use_bias=fields.flag("enable_bias", True),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        position_offset=2,
        embedding_size=embedding_size,
        **fields.special_ids(),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    model_type: ModelType
    read: Callable[[_Fields], ModelConfig]
    architectures: tuple[str, ...]
    names: dict[str, str]  # our word -> the file's


_READERS = {
    "gpt2": _Reader(
        "gpt2",
        _gpt2,
        ("GPT2LMHeadModel", "GPT2Model"),
        {
            "hidden_size": "n_embd",
            "embedding_size": "n_embd",
            "n_layers": "n_layer",
            "n_heads": "n_head",
            "ffn_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    "opt": _Reader(
        "opt",
        _opt,
        ("OPTForCausalLM", "OPTModel"),
        {
            "n_positions": "max_position_embeddings",
            "embedding_size": "word_embed_proj_dim",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "ffn_size": "ffn_dim",
        },
    ),
}


def _with_generation_config(model: ModelConfig, path: Path, other: Path) -> ModelConfig:
    """With generation_config.json's special tokens: it may add end tokens, not take any away."""
    if not os.path.exists(other):
        return model
    fields = _Fields(other, read_object(other, _MAX_CONFIG_BYTES))
    special = fields.special_ids()
    eos, bos = special["eos_token_ids"], special["bos_token_id"]
    if eos and not set(model.eos_token_ids) <= set(eos):
        raise _disagree("eos_token_id", path, list(model.eos_token_ids), other, list(eos))
    if bos is not None and model.bos_token_id not in (None, bos):
        raise _disagree("bos_token_id", path, model.bos_token_id, other, bos)
    try:
        return replace(
            model,
            eos_token_ids=eos or model.eos_token_ids,
            bos_token_id=model.bos_token_id if bos is None else bos,
        )
    except ConfigError as error:
        raise BadModelConfig(
            f"{shown(other)} does not fit {shown(path)} (vocab_size {model.vocab_size}): {error}"
        ) from error


def _disagree(name: str, one: Path, first: object, other: Path, second: object) -> BadModelConfig:
    return BadModelConfig(
        f"two files disagree on {name}: {shown(one)} says {shown(first)}, {shown(other)} says {shown(second)}"
    )


def check_tokenizer(model: ModelConfig, path: Path, tokenizer: Path) -> None:
    """Every token of the tokenizer has a row in the embedding table. Rows without a token are common.

    `path` is the file that `model` is from. Raises BadModelConfig or CorruptFile.
    """
    if not os.path.exists(tokenizer):
        return
    values = read_object(tokenizer, _MAX_TOKENIZER_BYTES)
    tokens = values.get("model")
    vocabulary = tokens.get("vocab") if isinstance(tokens, dict) else None
    added = values.get("added_tokens") or []
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise BadModelConfig(f"{shown(tokenizer)} has no model.vocab, so it is not a tokenizer's file")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [token.get("id") if isinstance(token, dict) else None for token in added]
    highest = -1
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise BadModelConfig(
                f"{shown(tokenizer)}: a token's id: expected a whole number, found {shown(token_id)}"
            )
        highest = max(highest, token_id)
    if highest >= model.vocab_size:
        raise BadModelConfig(
            f"two files disagree on the vocabulary: {shown(path)} says vocab_size {model.vocab_size}, "
            f"{shown(tokenizer)} has the token id {shown(highest)}"
        )


def hf_config_of(model: ModelConfig) -> dict[str, Any]:
    """A config.json that `read_hf_config` reads as `model`: GPT-2's where that can say it, or else OPT's.

    Raises UnsupportedModel where neither can.
    """
    special = {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
        "tie_word_embeddings": model.tie_embeddings,
        "vocab_size": model.vocab_size,
    }
    names = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
    plain = model.norm == "pre" and model.final_norm and model.use_bias
    if plain and model.position_offset == 0 and model.embedding_size == model.hidden_size:
        return special | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": model.n_positions,
            "n_embd": model.hidden_size,
            "n_layer": model.n_layers,
            "n_head": model.n_heads,
            "n_inner": model.ffn_size,
            "activation_function": names[model.activation],
            "layer_norm_epsilon": model.layer_norm_eps,
        }
    one_norm = model.norm == "pre" or not model.final_norm
    if model.position_offset == 2 and model.layer_norm_eps == 1e-5 and one_norm:
        return special | {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "max_position_embeddings": model.n_positions,
            "hidden_size": model.hidden_size,
            "word_embed_proj_dim": model.embedding_size,
            "num_hidden_layers": model.n_layers,
            "num_attention_heads": model.n_heads,
            "ffn_dim": model.ffn_size,
            "activation_function": names[model.activation],
            "do_layer_norm_before": model.norm == "pre",
            "_remove_final_layer_norm": model.norm == "pre" and not model.final_norm,
            "enable_bias": model.use_bias,
        }
    raise UnsupportedModel(
        "neither GPT-2's nor OPT's config.json can describe this model, so it has no Hugging Face layout: "
        "GPT-2 has LayerNorm before attention and at the end, biases, positions from 0; OPT positions from 2"
    )
