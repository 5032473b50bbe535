"""The arrays of MaxText's decoders, layer by layer or scanned: Llama, Mistral, Qwen 2 and 3, Gemma, mixtures.

Without scanned layers MaxText saves "params-decoder-layers_0-mlp-wi_0-kernel". With scanned layers the arrays
of equal layers are one array, whose second axis counts layers ("params-decoder-layers-mlp-wi_0-kernel"). In
Gemma 2 a pair of layers, with and without a window, is one layer of MaxText's; Gemma 3 scans groups of six.

MaxText's Llama 3.1 rotates neighbours, its other models halves of a head. In models that do not scale queries
the weights of queries have that factor. Gemma's embeddings are stored multiplied, and its norms as 1 + w.

In mixtures, experts are the first axis of their arrays, before the axis of scanned layers: [X, H, F] or [X,
L, H, F]. DeepSeek's layers with experts are "moe_layers", counted apart from the "dense_layers" before them;
its pairs of rotated elements are where Hugging Face's checkpoints have them. gpt-oss scans pairs of layers,
with and without a window.
"""

from dataclasses import replace

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import layer_parameters
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.names import (
    Mixture,
    array,
    arrays,
    is_gemma,
    mixture_of,
    queries_keys_values,
)

_GEMMA3_GROUP = 6  # layers that MaxText scans together
_GPT_OSS_GROUP = 2  # layers that MaxText scans together
_BLOCK: dict[Mixture, str] = {
    "mixtral": "MoeBlock_0",
    "qwen3_moe": "moe_block",
    "gpt_oss": "GptOssMlp",
    "deepseek": "DeepSeekMoeBlock_0.MoeBlock_0",
}
_SHARED = "DeepSeekMoeBlock_0.shared_experts"


def maxtext_names(
    model: ModelConfig, *, scanned: bool, interleaved: bool | None = None
) -> dict[str, StoredName]:
    """The arrays of each weight. Raises UnsupportedModel.

    `interleaved` says whether rotary positions turn neighbours; None is what MaxText does in such a model.
    """
    if interleaved is not None and model.attention.latent is not None:
        raise UnsupportedModel(
            "rotary is not known for latent attention, whose arrays have the order of Hugging Face's "
            "checkpoints: set rope_interleave in config.json"
        )
    if interleaved is None:
        rotary = model.attention.rotary
        interleaved = rotary is not None and rotary.scaling is not None and rotary.scaling.kind == "llama3"
    gemma, mixture = is_gemma(model), mixture_of(model, "maxtext")
    add = -1.0 if gemma else 0.0
    names = {
        "token_embedding": _changed(
            array("token_embedder.embedding", "V H"), multiply=1 / model.embedding.multiplier
        ),
        "final_norm.scale": _changed(array("decoder.decoder_norm.scale", "H"), add=add),
        "head.weight": array("decoder.logits_dense.kernel", "H V"),
    }
    arrays_of_layer = _layer(model, mixture, interleaved)
    for i in range(model.n_layers):
        place, name_of_part, layer, n_layers = _place(model, mixture, i, scanned)
        for name in layer_parameters(model, i):
            if name not in arrays_of_layer:
                continue
            stored = arrays_of_layer[name]
            if gemma and name.endswith("norm.scale"):
                stored = _changed(stored, add=add)
            names[f"layers.{i}.{name}"] = StoredName(
                tuple(place + _with_part(each, name_of_part) for each in stored.names),
                heads=stored.heads,
                forms=tuple(
                    _in_stack(form, layer, n_layers, first=name == "router.correction")
                    for form in stored.forms
                ),
            )
    return names


def _place(model: ModelConfig, mixture: Mixture | None, i: int, scanned: bool) -> tuple[str, str, int, int]:
    """The place of layer `i`: the beginning of its names, an ending of their first word, and layer of layers.

    A layer with arrays of its own is layer 0 of 0.
    """
    if mixture == "deepseek":
        n_dense = sum(layer.experts is None for layer in model.layers)
        kind, number, n_layers = "dense_layers", i, n_dense
        if i >= n_dense:
            kind, number, n_layers = "moe_layers", i - n_dense, model.n_layers - n_dense
        if scanned:
            return f"decoder.{kind}.", "", number, n_layers
        return f"decoder.{kind}_{number}.", "", 0, 0
    if is_gemma(model) and model.layers[0].residual == "both" and model.attention.qk_norm is None:
        ending = "_global" if i % 2 else "_local"
        if scanned:
            return "decoder.layers.", ending, i // 2, model.n_layers // 2
        return f"decoder.layers_{i // 2}.", ending, 0, 0
    if not scanned:
        return f"decoder.layers_{i}.", "", 0, 0
    if mixture == "gpt_oss":
        if model.n_layers % _GPT_OSS_GROUP:
            raise UnsupportedModel(
                f"maxtext-scanned has layers of gpt-oss in groups of {_GPT_OSS_GROUP}, and this model has "
                f"{model.n_layers}; use maxtext"
            )
        group, within = divmod(i, _GPT_OSS_GROUP)
        return f"decoder.layers.layers_{within}.", "", group, model.n_layers // _GPT_OSS_GROUP
    if is_gemma(model) and model.attention.qk_norm is not None:
        n_groups = model.n_layers // _GEMMA3_GROUP
        group, within = divmod(i, _GEMMA3_GROUP)
        if group == n_groups:
            return f"decoder.layers_remainder.layers_{within}.", "", 0, 0
        return f"decoder.layers.layers_{within}.", "", group, n_groups
    return "decoder.layers.", "", i, model.n_layers


def _layer(model: ModelConfig, mixture: Mixture | None, interleaved: bool) -> dict[str, StoredName]:
    """The arrays of one layer, without the beginning of their names."""
    gemma = is_gemma(model)
    layer_norm = "norm" if gemma else "layer_norm"
    place = "GptOssAttention" if mixture == "gpt_oss" else "self_attention"
    return {
        **(_latent(place) if mixture == "deepseek" else _attention(model, mixture, place, interleaved)),
        **(_experts(mixture) if mixture else {}),
        "up.weight": arrays(("mlp.wi_0.kernel", "H F"), ("mlp.wi_1.kernel", "H F")),
        "down.weight": array("mlp.wo.kernel", "F H"),
        "attn_norm.scale": array(f"pre_self_attention_{layer_norm}.scale", "H"),
        "attn_out_norm.scale": array("post_self_attention_norm.scale", "H"),
        "mlp_norm.scale": array(
            "pre_ffw_norm.scale" if gemma else f"post_self_attention_{layer_norm}.scale", "H"
        ),
        "mlp_out_norm.scale": array("post_ffw_norm.scale", "H"),
    }


def _experts(mixture: Mixture) -> dict[str, StoredName]:
    """The arrays of a layer's experts and of its router."""
    block = _BLOCK[mixture]
    router_bias = "router.correction" if mixture == "deepseek" else "router.bias"
    return {
        "router.weight": array(f"{block}.gate.kernel", "H X"),
        router_bias: array(f"{block}.gate.bias", "X"),
        "experts.up.weight": arrays((f"{block}.wi_0", "X H F"), (f"{block}.wi_1", "X H F")),
        "experts.up.bias": arrays((f"{block}.wi_0_bias", "X F"), (f"{block}.wi_1_bias", "X F")),
        "experts.down.weight": array(f"{block}.wo", "X F H"),
        "experts.down.bias": array(f"{block}.wo_bias", "X H"),
        "shared.up.weight": arrays((f"{_SHARED}.wi_0.kernel", "H S"), (f"{_SHARED}.wi_1.kernel", "H S")),
        "shared.down.weight": array(f"{_SHARED}.wo.kernel", "S H"),
    }


def _latent(place: str) -> dict[str, StoredName]:
    """The arrays of latent attention, whose names begin with `place`."""
    return {
        "q.weight": array(f"{place}.query.kernel", "H N Q"),
        "q_a.weight": array(f"{place}.wq_a.kernel", "H A"),
        "q_a_norm.scale": array(f"{place}.q_norm.scale", "A"),
        "q_b.weight": array(f"{place}.wq_b.kernel", "A N Q"),
        "kv_a.weight": array(f"{place}.wkv_a.kernel", "H R"),
        "kv_a_norm.scale": array(f"{place}.kv_norm.scale", "C"),
        "kv_b.weight": array(f"{place}.wkv_b.kernel", "C N M"),
        "out.weight": array(f"{place}.out.kernel", "N W H"),
    }


def _attention(
    model: ModelConfig, mixture: Mixture | None, place: str, interleaved: bool
) -> dict[str, StoredName]:
    attention = model.attention
    # MaxText scales the queries of models with a qk-norm, of Qwen and of gpt-oss, but not of the others.
    qwen = attention.qkv_bias and not attention.out_bias
    scales = attention.qk_norm is not None or qwen or mixture == "gpt_oss"
    multiply = 1.0 if scales else 1 / attention.scale
    query = ArrayForm("H N D", interleaved=interleaved, multiply=multiply)
    key = ArrayForm("H K D", interleaved=interleaved)
    return {
        "qkv.weight": queries_keys_values(
            (f"{place}.query.kernel", query),
            (f"{place}.key.kernel", key),
            (f"{place}.value.kernel", ArrayForm("H K D")),
        ),
        "qkv.bias": queries_keys_values(
            (f"{place}.query.bias", replace(query, axes="N D")),
            (f"{place}.key.bias", replace(key, axes="K D")),
            (f"{place}.value.bias", ArrayForm("K D")),
        ),
        "out.weight": array(f"{place}.out.kernel", "N D H", heads="queries"),
        "out.bias": array(f"{place}.out.bias", "H"),
        "q_norm.scale": _changed(array(f"{place}.query_norm.scale", "D"), interleaved=interleaved),
        "k_norm.scale": _changed(array(f"{place}.key_norm.scale", "D"), interleaved=interleaved),
        **({"sinks": array(f"{place}.sinks", "N", heads="queries")} if mixture == "gpt_oss" else {}),
    }


def _with_part(name: str, ending: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}{ending}.{rest}"


def _in_stack(form: ArrayForm, layer: int, n_layers: int, *, first: bool) -> ArrayForm:
    """Add the axis of layers to the form: usually the second axis, by a setting the first.

    With `first` it is usually the first axis, as in arrays that are no parameters to MaxText.
    """
    if not n_layers:
        return form
    letter, *others = form.letters
    orders = [" ".join((letter, "L", *others)), " ".join(("L", letter, *others))]
    axes = " | ".join(reversed(orders) if first else orders)
    return replace(form, axes=axes, layer=layer, n_layers=n_layers)


def _changed(
    stored: StoredName, *, interleaved: bool = False, multiply: float = 1.0, add: float = 0.0
) -> StoredName:
    forms = tuple(
        replace(
            form,
            interleaved=form.interleaved or interleaved,
            multiply=form.multiply * multiply,
            add=form.add + add,
        )
        for form in stored.forms
    )
    return replace(stored, forms=forms)
