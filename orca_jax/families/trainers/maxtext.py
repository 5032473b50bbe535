"""The arrays of MaxText's decoders: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, layer by layer or scanned.

MaxText saves "params-decoder-layers_0-mlp-wi_0-kernel" of a model without scanned layers. With scanned layers
those of one kind are one array, whose second axis counts them ("params-decoder-layers-mlp-wi_0-kernel").
Gemma 2 has two layers, one with a window and one without, as one layer; Gemma 3 scans groups of six. Mixtures
of experts are in maxtext_mixtures.py.

Its Llama 3.1 rotates neighbours, the others halves of a head. Models that do not scale queries have that
factor in the weights of the queries. Gemma's embeddings are multiplied already, and its norms have 1 + w.
"""

from dataclasses import replace

from orca_jax.errors import UnsupportedModel
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import layer_parameters
from orca_jax.families.stored_name import StoredName
from orca_jax.families.trainers.array_form import ArrayForm
from orca_jax.families.trainers.maxtext_mixtures import expert_arrays, latent_arrays, place_of_layer
from orca_jax.families.trainers.mixtures import Mixture, mixture_of
from orca_jax.families.trainers.names import array, arrays, is_gemma, queries_keys_values

_GEMMA3_GROUP = 6  # layers that MaxText scans together


def maxtext_names(
    model: ModelConfig, *, scanned: bool, interleaved: bool | None = None
) -> dict[str, StoredName]:
    """Every weight's arrays by our name for the weight. Raises UnsupportedModel.

    `interleaved`: whether rotary positions turn neighbours; None for what MaxText does to such a model.
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
    theirs = _layer(model, mixture, interleaved)
    for i in range(model.n_layers):
        place, name_of_part, layer, n_layers = _place(model, mixture, i, scanned)
        for name in layer_parameters(model, i):
            if name not in theirs:
                continue
            stored = theirs[name]
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
    """Where layer `i` is: the beginning of its names, an ending of their first word, and layer of layers.

    No layers: it has arrays of its own.
    """
    if mixture is not None:
        place, layer, n_layers = place_of_layer(model, mixture, i, scanned=scanned)
        return place, "", layer, n_layers
    if is_gemma(model) and model.layers[0].residual == "both" and model.attention.qk_norm is None:
        ending = "_global" if i % 2 else "_local"
        if scanned:
            return "decoder.layers.", ending, i // 2, model.n_layers // 2
        return f"decoder.layers_{i // 2}.", ending, 0, 0
    if not scanned:
        return f"decoder.layers_{i}.", "", 0, 0
    if is_gemma(model) and model.attention.qk_norm is not None:
        n_groups = model.n_layers // _GEMMA3_GROUP
        group, within = divmod(i, _GEMMA3_GROUP)
        if group == n_groups:
            return f"decoder.layers_remainder.layers_{within}.", "", 0, 0
        return f"decoder.layers.layers_{within}.", "", group, n_groups
    return "decoder.layers.", "", i, model.n_layers


def _layer(model: ModelConfig, mixture: Mixture | None, interleaved: bool) -> dict[str, StoredName]:
    """The arrays of a layer that is by itself, without what all their names begin with."""
    gemma = is_gemma(model)
    layer_norm = "norm" if gemma else "layer_norm"
    place = "GptOssAttention" if mixture == "gpt_oss" else "self_attention"
    return {
        **(latent_arrays(place) if mixture == "deepseek" else _attention(model, mixture, place, interleaved)),
        **(expert_arrays(mixture) if mixture else {}),
        "up.weight": arrays(("mlp.wi_0.kernel", "H F"), ("mlp.wi_1.kernel", "H F")),
        "down.weight": array("mlp.wo.kernel", "F H"),
        "attn_norm.scale": array(f"pre_self_attention_{layer_norm}.scale", "H"),
        "attn_out_norm.scale": array("post_self_attention_norm.scale", "H"),
        "mlp_norm.scale": array(
            "pre_ffw_norm.scale" if gemma else f"post_self_attention_{layer_norm}.scale", "H"
        ),
        "mlp_out_norm.scale": array("post_ffw_norm.scale", "H"),
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
    """The form in an array of several layers, whose second axis (or first, as a setting says) counts them.

    `first`: it is usually the first, as of what is no parameter to MaxText.
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
