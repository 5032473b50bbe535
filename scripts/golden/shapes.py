"""The shapes of the golden models, by name: what transformers' config of the model_type is made of.

decoders.py and encoders.py make their files. `max_position_embeddings` is the longest sequence of the tests;
keep sizes small and odd. Sections are in alphabetical order.
"""

from typing import Any

_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.5, 2.5, 4.0, 9.0],
}

_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")


def _shape(
    model_type: str, vocab: int, hidden: int, layers: int, heads: int, kv: int, inner: int, **other: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "max_position_embeddings": 96,
        **other,
    }


def _mixture(
    model_type: str,
    sizes: tuple[int, int, int, int, int, int],
    experts: tuple[int, int],
    number: str = "num_experts",
    **other: Any,
) -> dict[str, Any]:
    """`sizes` as of `_shape`; `experts`: how many there are, and how many a token takes."""
    shape = _shape(model_type, *sizes, max_position_embeddings=64, **other)
    return shape | {number: experts[0], "num_experts_per_tok": experts[1]}


def _routed(
    model_type: str,
    sizes: tuple[int, int, int, int, int, int],
    experts: tuple[int, int, int, int],
    **other: Any,
) -> dict[str, Any]:
    """`sizes` as of `_shape`; `experts` as `_ROUTED` names them."""
    shape = _shape(model_type, *sizes, max_position_embeddings=64)
    return shape | dict(zip(_ROUTED, experts, strict=True)) | other


def _delta_net(
    model_type: str,
    sizes: tuple[int, int, int, int, int, int],
    heads: tuple[int, int, int, int, int],
    experts: tuple[int, int, int, int] | None = None,
    **other: Any,
) -> dict[str, Any]:
    """`sizes` as of `_shape`; `heads`: linear key and value heads, their sizes, the convolution's width.

    `experts` are their number, the number that a token takes, their width and the shared expert's. The eps
    keeps a head's norm from enlarging the rounding of a query that hardly meets the state.
    """
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    ours = {f"linear_{name}": size for name, size in zip(names, heads, strict=True)}
    if experts is not None:
        more = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        ours |= dict(zip((*more, "shared_expert_intermediate_size"), experts, strict=True))
    return _shape(model_type, *sizes, **{"rms_norm_eps": 1e-2, **ours, **other})


def _mamba(
    model_type: str,
    sizes: tuple[int, int, int, int, int, int],
    mixer: tuple[int, int, int, int, int],
    **other: Any,
) -> dict[str, Any]:
    """`sizes` as of `_shape`; `mixer`: its heads, groups, state's size, convolution's width, expansion."""
    names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand")
    return _shape(
        model_type, *sizes, **{"rms_norm_eps": 1e-2, **dict(zip(names, mixer, strict=True)), **other}
    )


def _gemma4(
    sizes: tuple[int, int, int, int, int, int],
    heads: tuple[int, int],
    kinds: str,
    *,
    factor: float = 0.25,
    **other: Any,
) -> dict[str, Any]:
    """`sizes` as of `_shape`; `heads`: sizes with and without a window; `kinds`: s with, f without one."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    full = {"rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": 1e5}
    ours = {
        "head_dim": heads[0],
        "global_head_dim": heads[1],
        "layer_types": [names[kind] for kind in kinds],
        "sliding_window": 9,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": sizes[0],
        "rope_parameters": {"sliding_attention": _rope(1e4), "full_attention": full},
    }
    return _shape("gemma4_text", *sizes, **{"max_position_embeddings": 64, **ours, **other})


def _nemotron(
    kinds: str,
    sizes: tuple[int, int, int, int, int],
    mixer: tuple[int, int, int, int, int],
    **other: Any,
) -> dict[str, Any]:
    """`sizes`: vocabulary, hidden, heads, K/V heads, dense width; `mixer` as its names below."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    of_mixer = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": kinds,
        **dict(zip(names, sizes, strict=True)),
        **dict(zip(of_mixer, mixer, strict=True)),
        "max_position_embeddings": 64,
        "layer_norm_epsilon": 1e-2,
        **other,
    }


def _deepseek(
    version: str,
    sizes: tuple[int, int, int, int, int],
    heads: tuple[int | None, int, int, int, int],
    experts: tuple[int, int, int, int],
    **other: Any,
) -> dict[str, Any]:
    """`sizes`: vocabulary, hidden, layers, heads, dense width; `heads` as their names below."""
    vocab, hidden, layers, n_heads, inner = sizes
    shape = _shape(version, vocab, hidden, layers, n_heads, n_heads, inner, max_position_embeddings=64)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ours = dict(zip(names, heads, strict=True)) | dict(zip(_ROUTED, experts, strict=True))
    return shape | ours | other


def _indexed(
    model_type: str,
    sizes: tuple[int, int, int, int, int],
    heads: tuple[int, int, int, int, int],
    experts: tuple[int, int, int, int],
    indexer: tuple[int, int, int],
    **other: Any,
) -> dict[str, Any]:
    """The others as of `_deepseek`; `indexer`: its queries, their size, and how many keys it selects.

    With few queries many keys have a score of 0 because they meet none. These tie, and transformers does not
    say which of them it selects.
    """
    names = ("index_n_heads", "index_head_dim", "index_topk")
    return _deepseek(model_type, sizes, heads, experts, **dict(zip(names, indexer, strict=True)), **other)


def _rope(base: float, **other: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base} | other


def _gpt_neox(vocab: int, hidden: int, layers: int, heads: int, inner: int, **other: Any) -> dict[str, Any]:
    shape = _shape(
        "gpt_neox", vocab, hidden, layers, heads, heads, inner, max_position_embeddings=64, **other
    )
    del shape["num_key_value_heads"]
    return shape


def _gptj(vocab: int, hidden: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 64}
    return {"model_type": "gptj", **sizes, **other}


def _bloom(vocab: int, hidden: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "bloom", **sizes, "max_position_embeddings": 64, **other}


def _falcon(vocab: int, hidden: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 64}
    return {"model_type": "falcon", "vocab_size": vocab, "hidden_size": hidden, **sizes, **other}


def _t5(
    model_type: str,
    vocab: int,
    hidden: int,
    layers: tuple[int, int],
    heads: int,
    size: int,
    inner: int,
    **other: Any,
) -> dict[str, Any]:
    """`layers` of the encoder and of the decoder, `size` of a head."""
    return {
        "model_type": model_type,
        **{"vocab_size": vocab, "d_model": hidden, "num_heads": heads, "d_kv": size, "d_ff": inner},
        **{"num_layers": layers[0], "num_decoder_layers": layers[1]},
        **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
        **other,
    }


def _bart(
    model_type: str,
    vocab: int,
    hidden: int,
    layers: tuple[int, int],
    heads: int,
    inner: tuple[int, int],
    **other: Any,
) -> dict[str, Any]:
    """`layers` of the encoder and of the decoder, and `inner` widths of theirs."""
    return {
        "model_type": model_type,
        **{"vocab_size": vocab, "d_model": hidden, "max_position_embeddings": 80},
        **{"encoder_layers": layers[0], "decoder_layers": layers[1]},
        **{"encoder_attention_heads": heads, "decoder_attention_heads": heads},
        **{"encoder_ffn_dim": inner[0], "decoder_ffn_dim": inner[1]},
        **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
        **other,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # apertus
    "apertus-llama3": _shape(
        *("apertus", 101, 24, 2, 4, 2, 30),
        max_position_embeddings=64,
        rope_parameters=_rope(1e4, **_LLAMA3, original_max_position_embeddings=24),
    ),
    "apertus-biases-head-size": _shape(
        *("apertus", 83, 24, 2, 3, 3, 26),
        max_position_embeddings=64,
        head_dim=10,
        attention_bias=True,
        rope_parameters=_rope(5e3),
    ),
    "apertus-gelu-tied": _shape(
        *("apertus", 89, 24, 2, 4, 1, 36),
        max_position_embeddings=64,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # arcee
    "arcee-yarn": _shape(
        *("arcee", 97, 24, 2, 6, 2, 40),
        max_position_embeddings=64,
        head_dim=6,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    "arcee-biases-tied": _shape(
        *("arcee", 131, 30, 3, 5, 5, 34),
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "arcee-silu-linear": _shape(
        *("arcee", 93, 24, 2, 3, 1, 38),
        max_position_embeddings=64,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1e3, rope_type="linear", factor=2.0),
    ),
    # bloom
    "bloom-six-heads": _bloom(127, 30, 3, 6),
    "bloom-untied-slopes": _bloom(113, 33, 2, 11, tie_word_embeddings=False),
    "bloom-eps": _bloom(131, 32, 3, 4, layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    # cohere2
    "cohere2-window": _shape(
        *("cohere2", 103, 24, 4, 6, 2, 36),
        max_position_embeddings=64,
        sliding_window=9,
        logit_scale=0.5,
    ),
    "cohere2-biases-untied": _shape(
        *("cohere2", 87, 20, 3, 5, 5, 28),
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=1e-3,
        sliding_window=14,
        logit_scale=1.5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "cohere2-yarn-multi-query": _shape(
        *("cohere2", 91, 32, 2, 4, 1, 30),
        max_position_embeddings=64,
        sliding_window=40,
        logit_scale=0.25,
        rope_parameters=_rope(5e4, **_YARN),
    ),
    # ernie4_5
    "ernie4-5-tied": _shape("ernie4_5", 97, 24, 2, 6, 2, 36, max_position_embeddings=64, head_dim=6),
    "ernie4-5-biases-untied": _shape(
        *("ernie4_5", 83, 20, 3, 5, 5, 30),
        max_position_embeddings=64,
        head_dim=4,
        use_bias=True,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e4),
    ),
    "ernie4-5-yarn": _shape(
        *("ernie4_5", 89, 24, 2, 3, 1, 40),
        max_position_embeddings=64,
        head_dim=10,
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # exaone4
    "exaone4-window": _shape(
        *("exaone4", 95, 24, 4, 6, 2, 36),
        max_position_embeddings=64,
        sliding_window=8,
        rope_parameters=_rope(1e4),
    ),
    "exaone4-no-window-llama3-tied": _shape(
        *("exaone4", 141, 30, 2, 5, 5, 34),
        max_position_embeddings=64,
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, **_LLAMA3, original_max_position_embeddings=24),
    ),
    "exaone4-full-first-head-size": _shape(
        *("exaone4", 87, 24, 3, 4, 1, 34),
        max_position_embeddings=64,
        head_dim=10,
        sliding_window=13,
        rms_norm_eps=1e-6,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=_rope(1e5, rope_type="linear", factor=2.0),
    ),
    # falcon
    "falcon-multi-query": _falcon(107, 30, 2, 5),
    "falcon-multi-query-bias": _falcon(
        89, 24, 2, 4, bias=True, ffn_hidden_size=50, rope_parameters=_rope(500.0)
    ),
    "falcon-new-decoder": _falcon(101, 24, 3, 6, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-new-one-norm-linear": _falcon(
        *(113, 32, 2, 4),
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e4, rope_type="linear", factor=4.0),
    ),
    "falcon-rw": _falcon(
        *(157, 36, 3, 6),
        ffn_hidden_size=50,
        alibi=True,
        bias=True,
        multi_query=False,
        parallel_attn=False,
        activation="gelu_new",
    ),
    "falcon-rw-parallel": _falcon(109, 30, 3, 5, alibi=True, multi_query=False, tie_word_embeddings=False),
    # falcon_h1
    "falcon-h1-multipliers": _mamba(
        *("falcon_h1", (113, 24, 2, 4, 2, 40), (6, 2, 7, 4, 2)),
        **{"mamba_d_ssm": 30, "mamba_d_head": 5, "head_dim": 8, "max_position_embeddings": 64},
        **{"attention_in_multiplier": 0.7, "attention_out_multiplier": 0.8, "key_multiplier": 1.3},
        **{"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "lm_head_multiplier": 0.5},
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        mlp_multipliers=[1.4, 0.6],
        embedding_multiplier=2.0,
    ),
    "falcon-h1-norm-first-biases": _mamba(
        *("falcon_h1", (107, 20, 3, 2, 1, 30), (4, 1, 6, 3, 2)),
        **{"mamba_d_ssm": 24, "mamba_d_head": 6, "max_position_embeddings": 64, "mamba_rms_norm": True},
        **{"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
        tie_word_embeddings=True,
    ),
    "falcon-h1-gate-first": _mamba(
        *("falcon_h1", (109, 24, 2, 2, 2, 28), (4, 2, 5, 4, 2)),
        **{"mamba_d_ssm": 32, "mamba_d_head": 8, "max_position_embeddings": 64, "mamba_rms_norm": True},
        mamba_norm_before_gate=False,
        mamba_conv_bias=False,
    ),
    # llama4_text
    "llama4-chunks": _mixture(
        *("llama4_text", (113, 24, 4, 4, 2, 20), (5, 1), "num_local_experts"),
        **{"head_dim": 8, "intermediate_size_mlp": 30, "interleave_moe_layer_step": 2},
        **{"attention_chunk_size": 7, "no_rope_layer_interval": 4, "floor_scale": 5, "attn_scale": 0.4},
        rope_parameters=_rope(5e5, **(_LLAMA3 | {"original_max_position_embeddings": 16})),
    ),
    "llama4-two-of-six-biases": _mixture(
        *("llama4_text", (107, 28, 3, 4, 1, 16), (6, 2), "num_local_experts"),
        **{"head_dim": 6, "intermediate_size_mlp": 26, "moe_layers": [0, 2], "use_qk_norm": False},
        **{"attention_chunk_size": 16, "no_rope_layers": [1, 0, 1], "attn_temperature_tuning": False},
        attention_bias=True,
    ),
    # gemma4_text
    "gemma4-inputs-shared": _gemma4(
        *((127, 24, 5, 4, 2, 36), (8, 16), "ssfsf"),
        hidden_size_per_layer_input=10,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=9.0,
    ),
    "gemma4-keys-are-values-biases": _gemma4(
        *((109, 28, 3, 4, 4, 30), (6, 12), "sfs"),
        factor=0.5,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4-with-experts": _gemma4(
        *((113, 20, 3, 2, 1, 26), (8, 16), "ssf"),
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=14,
    ),
    # gemma, gemma2, gemma3_text
    "gemma-head-size": _shape(
        *("gemma", 97, 24, 2, 4, 1, 36),
        max_position_embeddings=64,
        head_dim=10,
    ),
    "gemma-untied-biases": _shape(
        *("gemma", 115, 20, 2, 5, 5, 28),
        max_position_embeddings=64,
        head_dim=4,
        attention_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters=_rope(5e3, rope_type="linear", factor=2.0),
    ),
    "gemma-gelu-yarn": _shape(  # whose gelu is the approximation
        *("gemma", 83, 32, 2, 4, 2, 44),
        max_position_embeddings=64,
        head_dim=6,
        hidden_act="gelu",
        rope_parameters=_rope(1e4, **_YARN),
    ),
    "gemma2-caps": _shape(
        *("gemma2", 149, 24, 2, 4, 2, 40),
        max_position_embeddings=64,
        head_dim=10,
        query_pre_attn_scalar=7,
        sliding_window=9,
        attn_logit_softcapping=2.5,
        final_logit_softcapping=4.0,
    ),
    "gemma2-no-caps-biases": _shape(
        *("gemma2", 107, 20, 3, 5, 1, 30),
        max_position_embeddings=64,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=False,
        query_pre_attn_scalar=20,
        sliding_window=14,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma2-llama3-rope": _shape(
        *("gemma2", 109, 18, 2, 3, 3, 26),
        max_position_embeddings=64,
        head_dim=16,
        query_pre_attn_scalar=16,
        hidden_activation="gelu",
        sliding_window=3,
        rope_parameters=_rope(1e4, **_LLAMA3, original_max_position_embeddings=24),
    ),
    "gemma3-linear": _shape(
        *("gemma3_text", 113, 32, 3, 4, 1, 32),
        max_position_embeddings=64,
        head_dim=10,
        query_pre_attn_scalar=12,
        tie_word_embeddings=False,
        sliding_window=8,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": _rope(1e5, rope_type="linear", factor=4.0),
            "sliding_attention": _rope(1e3),
        },
    ),
    "gemma3-untied-biases-cap": _shape(
        *("gemma3_text", 89, 20, 3, 5, 5, 28),
        max_position_embeddings=64,
        head_dim=6,
        attention_bias=True,
        tie_word_embeddings=False,
        query_pre_attn_scalar=6,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=5.0,
    ),
    "gemma3-yarn": _shape(
        *("gemma3_text", 151, 24, 2, 6, 2, 36),
        max_position_embeddings=64,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=5,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": _rope(1e4, **_YARN),
            "sliding_attention": _rope(1e4),
        },
    ),
    # glm4
    "glm4-half-rotated": _shape("glm4", 101, 24, 2, 6, 2, 34, max_position_embeddings=64, head_dim=8),
    "glm4-no-bias-tied-all-rotated": _shape(
        *("glm4", 83, 20, 3, 5, 5, 28),
        max_position_embeddings=64,
        head_dim=6,
        attention_bias=False,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters=_rope(5e3, partial_rotary_factor=1.0),
    ),
    "glm4-yarn": _shape(
        *("glm4", 89, 24, 2, 4, 1, 30),
        max_position_embeddings=64,
        head_dim=12,
        rope_parameters=_rope(1e4, **_YARN, partial_rotary_factor=0.7),
    ),
    # gpt_neox
    "gpt-neox-partial": _gpt_neox(109, 40, 2, 5, 30),
    "gpt-neox-sequential-tied": _gpt_neox(
        *(97, 36, 3, 3, 50),
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attention_bias=False,
        hidden_act="gelu_new",
        rope_parameters=_rope(500.0, partial_rotary_factor=0.5),
    ),
    "gpt-neox-linear": _gpt_neox(
        103,
        32,
        2,
        2,
        44,
        rope_parameters=_rope(1e4, rope_type="linear", factor=4.0, partial_rotary_factor=1.0),
    ),
    "gpt-neox-yarn": _gpt_neox(
        91, 24, 2, 3, 40, layer_norm_eps=1e-3, rope_parameters=_rope(1e3, **_YARN, partial_rotary_factor=0.75)
    ),
    # gptj
    "gptj-partial": _gptj(107, 28, 2, 4, rotary_dim=4),
    "gptj-full-rotation-tied": _gptj(89, 30, 2, 5, rotary_dim=6, tie_word_embeddings=True),
    "gptj-inner-gelu": _gptj(
        131, 36, 2, 3, rotary_dim=10, n_inner=50, activation_function="gelu", layer_norm_epsilon=1e-3
    ),
    # granite
    "granite-multipliers": _shape(
        *("granite", 149, 24, 2, 6, 2, 40),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        embedding_multiplier=2.5,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=1.5,
    ),
    "granite-biases": _shape(
        *("granite", 93, 20, 3, 5, 5, 28),
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        attention_multiplier=0.0625,
        residual_multiplier=1.25,
        logits_scaling=0.75,
        rope_parameters=_rope(1e6),
    ),
    "granite-linear": _shape(
        *("granite", 107, 36, 2, 3, 1, 50),
        max_position_embeddings=64,
        embedding_multiplier=12,
        attention_multiplier=0.2,
        rope_parameters=_rope(1e4, rope_type="linear", factor=2.5),
    ),
    # hunyuan_v1_dense
    "hunyuan-alpha": _shape(
        *("hunyuan_v1_dense", 97, 24, 2, 6, 2, 36),
        max_position_embeddings=64,
        head_dim=6,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, rope_type="dynamic", alpha=50.0, factor=1.0),
    ),
    "hunyuan-biases": _shape(
        *("hunyuan_v1_dense", 83, 20, 3, 5, 5, 30),
        max_position_embeddings=64,
        head_dim=4,
        attention_bias=True,
    ),
    "hunyuan-yarn": _shape(
        *("hunyuan_v1_dense", 89, 24, 2, 3, 1, 34),
        max_position_embeddings=64,
        head_dim=10,
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # lfm2
    "lfm2-recurrent-last": _shape(
        *("lfm2", 101, 24, 4, 4, 2, 36),
        max_position_embeddings=64,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_auto_adjust_ff_dim=False,
        rope_parameters=_rope(1e6),
    ),
    "lfm2-attending-last-wide-biases": _shape(
        *("lfm2", 97, 20, 3, 2, 1, 40),
        max_position_embeddings=64,
        layer_types=["conv", "conv", "full_attention"],
        conv_L_cache=5,
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        rope_parameters=_rope(1e4),
    ),
    "lfm2-adjusted-width": _shape(
        *("lfm2", 107, 28, 2, 2, 2, 50),
        max_position_embeddings=64,
        layer_types=["full_attention", "conv"],
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.25,
        rope_parameters=_rope(1e6),
    ),
    # llama
    "llama-grouped": _shape("llama", 211, 48, 3, 6, 2, 80, head_dim=10, rms_norm_eps=1e-5),
    "llama3-rope-tied": _shape(
        *("llama", 307, 40, 2, 4, 1, 56),
        tie_word_embeddings=True,
        rope_parameters=_rope(5e5, **_LLAMA3, original_max_position_embeddings=24),
    ),
    "llama-biases-yarn": _shape(
        *("llama", 157, 32, 3, 4, 4, 44),
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_rope(1e4, **_YARN, beta_fast=8.0),
    ),
    "llama-linear": _shape(
        "llama", 131, 36, 2, 6, 3, 52, rope_parameters=_rope(1e3, rope_type="linear", factor=2.5)
    ),
    "llama-dynamic": _shape(
        "llama", 101, 24, 2, 3, 1, 36, rope_parameters=_rope(1e4, rope_type="dynamic", factor=3.0)
    ),
    # ministral3: queries grow at every fourth, eighth or sixteenth position
    "ministral3-yarn-temperature": _shape(
        *("ministral3", 101, 24, 2, 6, 2, 36),
        max_position_embeddings=64,
        head_dim=6,
        rope_parameters=_rope(1e4, **_YARN, llama_4_scaling_beta=0.3)
        | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3-window-tied": _shape(
        *("ministral3", 97, 24, 3, 6, 6, 30),
        max_position_embeddings=64,
        head_dim=4,
        sliding_window=11,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, original_max_position_embeddings=4, llama_4_scaling_beta=0.2),
    ),
    "ministral3-multi-query": _shape(
        *("ministral3", 89, 24, 2, 4, 1, 34),
        max_position_embeddings=64,
        head_dim=10,
        rms_norm_eps=1e-6,
        rope_parameters=_rope(1e6, **_YARN, llama_4_scaling_beta=0.1)
        | {"original_max_position_embeddings": 8, "factor": 8.0},
    ),
    # mistral
    "mistral-window": _shape(
        *("mistral", 97, 24, 2, 6, 2, 40),
        max_position_embeddings=64,
        sliding_window=11,
    ),
    "mistral-no-window-head-size": _shape(
        *("mistral", 83, 20, 2, 3, 1, 28),
        max_position_embeddings=64,
        head_dim=14,
        sliding_window=None,
        rope_parameters=_rope(1e6),
    ),
    "mistral-yarn-tied": _shape(
        *("mistral", 113, 30, 3, 5, 5, 36),
        max_position_embeddings=64,
        sliding_window=2,  # with 1, generate() of transformers 5.23 sees every cached key
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, **_YARN, mscale=1.0, mscale_all_dim=0.5),
    ),
    # olmo2
    "olmo2-grouped": _shape(
        *("olmo2", 121, 24, 2, 6, 2, 36),
        max_position_embeddings=64,
        rope_parameters=_rope(5e5),
    ),
    "olmo2-tied-biases": _shape(
        *("olmo2", 211, 30, 3, 5, 5, 38),
        max_position_embeddings=64,
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    ),
    "olmo2-yarn": _shape(
        *("olmo2", 95, 32, 2, 4, 1, 44),
        max_position_embeddings=64,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # olmo3
    "olmo3-window": _shape("olmo3", 99, 24, 4, 6, 2, 34, max_position_embeddings=64, sliding_window=9),
    "olmo3-yarn-biases": _shape(
        *("olmo3", 151, 30, 3, 5, 5, 28),
        max_position_embeddings=64,
        attention_bias=True,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": _rope(1e4, **_YARN), "sliding_attention": _rope(1e3)},
    ),
    "olmo3-tied": _shape(
        *("olmo3", 91, 32, 2, 4, 1, 30),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    ),
    # phi3
    "phi3-longrope": _shape(  # beyond its original length
        *("phi3", 91, 32, 2, 4, 2, 36),
        max_position_embeddings=64,
        original_max_position_embeddings=24,
        rope_parameters=_rope(1e4, **_LONGROPE),
    ),
    "phi3-longrope-short-factors": _shape(  # within its original length
        *("phi3", 107, 24, 2, 3, 3, 44),
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, **_LONGROPE, attention_factor=1.25),
    ),
    "phi3-partial-window": _shape(
        *("phi3", 73, 40, 2, 4, 1, 28),
        max_position_embeddings=64,
        sliding_window=10,
        rope_parameters=_rope(5e3, partial_rotary_factor=0.6),
    ),
    "phi3-partial-longrope": _shape(
        *("phi3", 119, 48, 2, 4, 4, 26),
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=_rope(1e4, **_LONGROPE, partial_rotary_factor=0.7),
    ),
    # qwen2, qwen3
    "qwen2-tied": _shape(
        *("qwen2", 127, 28, 2, 7, 1, 44),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e6),
    ),
    "qwen2-window-of-last-layers": _shape(
        *("qwen2", 89, 24, 3, 4, 2, 32),
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "qwen2-yarn": _shape(
        *("qwen2", 101, 30, 2, 3, 3, 38),
        max_position_embeddings=64,
        rope_parameters=_rope(1e5, **_YARN),
    ),
    "qwen3-tied": _shape(
        *("qwen3", 103, 24, 2, 6, 3, 36),
        max_position_embeddings=64,
        head_dim=10,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e6),
    ),
    "qwen3-biases-window": _shape(
        *("qwen3", 79, 32, 3, 4, 1, 30),
        max_position_embeddings=64,
        head_dim=6,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-yarn": _shape(
        *("qwen3", 109, 20, 2, 2, 2, 42),
        max_position_embeddings=64,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4, **_YARN, attention_factor=0.75),
    ),
    # seed_oss
    "seed-oss-head-size": _shape("seed_oss", 97, 24, 2, 6, 2, 36, max_position_embeddings=64, head_dim=6),
    "seed-oss-all-biases-tied": _shape(
        *("seed_oss", 83, 20, 3, 5, 5, 28),
        max_position_embeddings=64,
        head_dim=8,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e7),
    ),
    "seed-oss-no-bias-yarn": _shape(
        *("seed_oss", 89, 24, 2, 4, 1, 34),
        max_position_embeddings=64,
        head_dim=10,
        attention_bias=False,
        attention_out_bias=True,
        rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # smollm3
    "smollm3-every-fourth": _shape("smollm3", 103, 24, 4, 4, 2, 30, max_position_embeddings=64),
    "smollm3-window-biases-untied": _shape(
        *("smollm3", 83, 24, 3, 6, 2, 28),
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=10,
        rope_parameters=_rope(1e4),
    ),
    "smollm3-yarn": _shape(
        *("smollm3", 91, 32, 2, 4, 1, 34),
        max_position_embeddings=64,
        no_rope_layer_interval=2,
        rms_norm_eps=1e-5,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # starcoder2
    "starcoder2-window": _shape(
        *("starcoder2", 99, 24, 2, 6, 2, 56),
        max_position_embeddings=64,
        sliding_window=12,
    ),
    "starcoder2-untied-no-bias": _shape(
        *("starcoder2", 85, 20, 3, 5, 1, 42),
        max_position_embeddings=64,
        use_bias=False,
        tie_word_embeddings=False,
        norm_epsilon=1e-6,
        rope_parameters=_rope(1e5),
    ),
    "starcoder2-head-size-gelu-linear": _shape(
        *("starcoder2", 111, 32, 2, 3, 3, 46),
        max_position_embeddings=64,
        head_dim=12,
        hidden_act="gelu",
        rope_parameters=_rope(1e3, rope_type="linear", factor=2.0),
    ),
    # mixtral
    "mixtral-grouped": _mixture("mixtral", (103, 24, 2, 6, 2, 20), (8, 2), number="num_local_experts"),
    "mixtral-window-tied": _mixture(
        *("mixtral", (89, 32, 3, 4, 1, 18), (5, 3)),
        number="num_local_experts",
        sliding_window=11,
        tie_word_embeddings=True,
    ),
    "mixtral-one-of-three-yarn": _mixture(
        *("mixtral", (97, 32, 2, 4, 4, 26), (3, 1)),
        number="num_local_experts",
        head_dim=6,
        rope_parameters=_rope(1e6, **_YARN),
    ),
    # qwen2_moe, qwen3_moe
    "qwen2-moe-shared": _mixture(
        *("qwen2_moe", (107, 24, 2, 4, 2, 36), (6, 4)),
        moe_intermediate_size=14,
        shared_expert_intermediate_size=22,
    ),
    "qwen2-moe-dense-first-renormalised": _mixture(
        *("qwen2_moe", (91, 30, 3, 5, 5, 34), (9, 2)),
        moe_intermediate_size=12,
        shared_expert_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    "qwen2-moe-every-other-window-no-bias": _mixture(
        *("qwen2_moe", (113, 32, 4, 4, 1, 30), (4, 1)),
        moe_intermediate_size=10,
        shared_expert_intermediate_size=26,
        decoder_sparse_step=2,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3-moe-renormalised": _mixture(
        *("qwen3_moe", (109, 24, 2, 6, 3, 40), (16, 4)),
        head_dim=10,
        moe_intermediate_size=14,
        norm_topk_prob=True,
    ),
    "qwen3-moe-dense-among-sparse-biases": _mixture(
        *("qwen3_moe", (113, 28, 3, 4, 2, 32), (6, 2)),
        head_dim=6,
        moe_intermediate_size=18,
        mlp_only_layers=[1],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3-moe-window-yarn": _mixture(
        *("qwen3_moe", (127, 32, 2, 4, 1, 30), (5, 5)),
        head_dim=8,
        moe_intermediate_size=22,
        use_sliding_window=True,
        sliding_window=13,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # qwen3_next
    "qwen3-next-grouped": _delta_net(
        *("qwen3_next", (107, 24, 3, 4, 2, 36), (2, 6, 8, 6, 4), (6, 3, 14, 10)),
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        max_position_embeddings=80,
    ),
    "qwen3-next-dense-among-sparse-tied": _delta_net(
        *("qwen3_next", (113, 28, 3, 4, 4, 32), (3, 3, 6, 10, 3), (5, 2, 18, 12)),
        head_dim=8,
        max_position_embeddings=64,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        rope_parameters=_rope(1e4, partial_rotary_factor=0.5, **_YARN),
    ),
    # qwen3_5_text, qwen3_5_moe_text
    "qwen3-5-grouped": _delta_net(
        *("qwen3_5_text", (103, 24, 3, 4, 2, 36), (2, 4, 8, 6, 4)),
        head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        max_position_embeddings=80,
        rope_parameters=_rope(1e7, partial_rotary_factor=0.25)
        | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    ),
    "qwen3-5-biases": _delta_net(
        *("qwen3_5_text", (113, 20, 3, 2, 1, 30), (3, 3, 6, 10, 2)),
        head_dim=12,
        max_position_embeddings=64,
        attention_bias=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=_rope(1e4, partial_rotary_factor=0.5),
    ),
    "qwen3-5-moe-grouped": _delta_net(
        *("qwen3_5_moe_text", (109, 24, 3, 4, 1, 36), (2, 4, 6, 8, 4), (6, 3, 14, 10)),
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        max_position_embeddings=64,
        rope_parameters=_rope(1e6, partial_rotary_factor=0.5),
    ),
    "qwen3-5-moe-tied": _delta_net(
        *("qwen3_5_moe_text", (101, 30, 3, 3, 3, 32), (3, 3, 10, 6, 3), (5, 2, 16, 10)),
        head_dim=12,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        max_position_embeddings=72,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, partial_rotary_factor=0.5),
    ),
    # granitemoehybrid
    "granite-hybrid-experts": _mamba(
        *("granitemoehybrid", (173, 24, 3, 4, 2, 14), (6, 2, 7, 4, 2)),
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        max_position_embeddings=64,
        attention_bias=True,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=0.5,
        embedding_multiplier=3.0,
        tie_word_embeddings=True,
    ),
    "granite-hybrid-dense-rope": _mamba(
        *("granitemoehybrid", (115, 30, 3, 5, 5, 33), (4, 1, 9, 3, 2)),
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 34},
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        max_position_embeddings=64,
        position_embedding_type="rope",
        attention_multiplier=0.4,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
    ),
    # nemotron_h
    "nemotron-h-experts-mixer-last": _nemotron(
        *("ME*EM", (127, 24, 4, 2, 30), (6, 5, 2, 7, 3)),
        **{"head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14},
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=2.5,
    ),
    "nemotron-h-without-experts": _nemotron(
        *("MM-*-M-", (109, 28, 3, 1, 34), (4, 8, 1, 9, 4)),
        head_dim=12,
        mlp_bias=True,
        use_bias=True,
        use_conv_bias=False,
        mlp_hidden_act="silu",
    ),
    "nemotron-h-experts-latent": _nemotron(
        *("E*M-E", (139, 24, 2, 2, 26), (6, 4, 3, 6, 2)),
        **{"head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10},
        **{"moe_shared_expert_intermediate_size": 18, "moe_latent_size": 12},
        **{"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    # bamba
    "bamba-grouped": _mamba(
        *("bamba", (111, 32, 2, 4, 2, 40), (8, 2, 6, 4, 2)),
        attn_layer_indices=[0],
        max_position_embeddings=64,
    ),
    "bamba-biases-tied": _mamba(
        *("bamba", (197, 24, 3, 3, 3, 30), (3, 1, 10, 3, 1)),
        attn_layer_indices=[0, 2],
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # lfm2_moe
    "lfm2-moe-dense-first": _mixture(
        *("lfm2_moe", (103, 24, 3, 4, 2, 30), (6, 3)),
        moe_intermediate_size=14,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
        layer_types=["conv", "full_attention", "conv"],
        rope_parameters=_rope(1e6),
    ),
    "lfm2-moe-no-bias-untied": _mixture(
        *("lfm2_moe", (97, 20, 3, 2, 1, 28), (5, 2)),
        moe_intermediate_size=16,
        num_dense_layers=0,
        norm_topk_prob=False,
        use_expert_bias=False,
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
        layer_types=["full_attention", "conv", "conv"],
        rope_parameters=_rope(1e4),
    ),
    # olmoe
    "olmoe-grouped": _mixture("olmoe", (101, 36, 2, 6, 2, 16), (7, 3)),
    "olmoe-biases-yarn": _mixture(
        *("olmoe", (95, 32, 3, 4, 4, 14), (5, 2)),
        norm_topk_prob=True,
        attention_bias=True,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    "olmoe-tied-multi-query": _mixture("olmoe", (119, 24, 2, 4, 1, 18), (8, 1), tie_word_embeddings=True),
    # deepseek_v2, deepseek_v3
    "deepseek-v2-greedy-no-query-rank": _deepseek(
        *("deepseek_v2", (97, 24, 2, 3, 20), (None, 10, 6, 4, 8), (6, 2, 12, 2)),
        routed_scaling_factor=1.5,
    ),
    "deepseek-v2-groups-yarn-dense-first": _deepseek(
        *("deepseek_v2", (103, 20, 3, 4, 28), (14, 12, 8, 6, 5), (8, 3, 10, 1)),
        **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.0},
        rope_parameters=_rope(1e4, **_YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v2-biases-tied": _deepseek(
        *("deepseek_v2", (131, 22, 2, 2, 24), (9, 16, 6, 8, 11), (5, 1, 14, 1)),
        **{"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "deepseek-v3-groups-yarn-dense-first": _deepseek(
        *("deepseek_v3", (109, 28, 2, 4, 30), (12, 16, 8, 8, 8), (12, 3, 10, 1)),
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        rope_parameters=_rope(1e4, **_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek-v3-halves-no-query-rank": _deepseek(
        *("deepseek_v3", (101, 20, 2, 4, 26), (None, 9, 7, 6, 10), (6, 2, 12, 2)),
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "rope_interleave": False},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "deepseek-v3-biases-yarn-factor": _deepseek(
        *("deepseek_v3", (123, 26, 2, 2, 22), (11, 14, 5, 4, 6), (8, 4, 9, 1)),
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "attention_bias": True},
        rope_parameters=_rope(1e3, **_YARN, mscale=1.0, mscale_all_dim=0.5),
    ),
    # glm4_moe, glm4_moe_lite
    "glm4-moe-dense-first": _routed(
        *("glm4_moe", (101, 24, 3, 4, 2, 30), (8, 3, 10, 1)),
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 8},
    ),
    "glm4-moe-norms-biases": _routed(
        *("glm4_moe", (97, 20, 2, 5, 1, 26), (6, 2, 12, 2)),
        **{"first_k_dense_replace": 0, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        **{"norm_topk_prob": False, "tie_word_embeddings": True},
        rope_parameters=_rope(1e4, **_YARN, partial_rotary_factor=1.0),
    ),
    "glm4-moe-lite-dense-first": _deepseek(
        *("glm4_moe_lite", (109, 28, 2, 4, 30), (12, 16, 8, 8, 8), (12, 3, 10, 1)),
        **{"n_group": 4, "topk_group": 2},
        rope_parameters=_rope(1e4, **_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4-moe-lite-dense-last": _deepseek(
        *("glm4_moe_lite", (101, 20, 2, 4, 26), (None, 9, 7, 6, 10), (6, 2, 12, 2)),
        **{"mlp_layer_types": ["sparse", "dense"], "rope_interleave": False, "attention_bias": True},
    ),
    # deepseek_v32, glm_moe_dsa: most prompts are longer than index_topk
    "deepseek-v32-groups-yarn": _indexed(
        *("deepseek_v32", (109, 28, 3, 4, 30), (12, 16, 8, 8, 8), (12, 3, 10, 1), (14, 12, 8)),
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        rope_parameters=_rope(1e4, **_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek-v32-biases": _indexed(
        *("deepseek_v32", (97, 24, 2, 2, 26), (14, 9, 7, 6, 10), (6, 2, 12, 2), (16, 6, 16)),
        **{"mlp_layer_types": ["sparse", "dense"], "n_group": 1, "topk_group": 1, "attention_bias": True},
        **{"norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "deepseek-v32-one-key": _indexed(
        *("deepseek_v32", (123, 26, 2, 2, 22), (11, 14, 5, 4, 6), (8, 4, 9, 1), (12, 10, 1)),
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    ),
    "glm-moe-dsa-dense-first": _indexed(
        *("glm_moe_dsa", (101, 20, 3, 4, 26), (13, 12, 6, 4, 8), (8, 3, 10, 1), (13, 10, 8)),
        first_k_dense_replace=1,
    ),
    "glm-moe-dsa-groups-yarn": _indexed(
        *("glm_moe_dsa", (95, 26, 2, 2, 24), (10, 9, 5, 8, 7), (8, 2, 9, 2), (16, 8, 12)),
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
        rope_parameters=_rope(1e4, **_YARN, mscale=1.0, mscale_all_dim=0.5),
    ),
    "glm-moe-dsa-shared": _indexed(
        *("glm_moe_dsa", (107, 24, 3, 3, 22), (12, 11, 5, 6, 7), (6, 2, 10, 1), (12, 12, 9)),
        **{"indexer_types": ["full", "shared", "shared"], "first_k_dense_replace": 1},
    ),
    "glm-moe-dsa-dense-among-sparse": _indexed(
        *("glm_moe_dsa", (117, 22, 3, 3, 20), (9, 10, 4, 6, 5), (5, 2, 11, 1), (12, 16, 20)),
        **{"mlp_layer_types": ["dense", "sparse", "dense"], "tie_word_embeddings": True},
    ),
    # mistral4: the length before yarn, and of a temperature, is shorter than most prompts
    "mistral4-temperature": _deepseek(
        *("mistral4", (103, 24, 2, 4, 28), (12, 10, 6, 4, 8), (8, 3, 10, 1)),
        rope_parameters=_rope(
            1e4,
            **_YARN | {"original_max_position_embeddings": 8},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        ),
    ),
    "mistral4-without-query-rank": _deepseek(
        *("mistral4", (97, 20, 2, 2, 26), (None, 9, 4, 4, 6), (5, 2, 12, 2)),
        **{"first_k_dense_replace": 1, "rope_interleave": False, "norm_topk_prob": False},
        **{"routed_scaling_factor": 1.5, "tie_word_embeddings": True},
        rope_parameters=_rope(1e3, **_YARN, llama_4_scaling_beta=0.0),
    ),
    # minimax_m2
    "minimax-m2-half-rotated": _mixture(
        *("minimax_m2", (103, 24, 2, 6, 2, 18), (8, 3)),
        number="num_local_experts",
        head_dim=8,
        rotary_dim=4,
    ),
    "minimax-m2-yarn-tied": _mixture(
        *("minimax_m2", (89, 28, 2, 4, 1, 14), (5, 2)),
        number="num_local_experts",
        head_dim=10,
        tie_word_embeddings=True,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # ernie4_5_moe
    "ernie4-5-moe-shared": _mixture(
        *("ernie4_5_moe", (107, 24, 3, 4, 2, 30), (8, 3)),
        number="moe_num_experts",
        moe_k=3,
        moe_intermediate_size=10,
    ),
    "ernie4-5-moe-every-other-untied": _mixture(
        *("ernie4_5_moe", (95, 20, 4, 5, 5, 26), (6, 2)),
        **{"number": "moe_num_experts", "moe_k": 2, "moe_intermediate_size": 12},
        **{"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2},
        **{"moe_num_shared_experts": 1, "moe_norm_min": 0.5},
        tie_word_embeddings=False,
    ),
    # flex_olmo
    "flex-olmo-grouped": _mixture("flex_olmo", (101, 36, 2, 6, 2, 16), (7, 3)),
    "flex-olmo-biases-yarn": _mixture(
        *("flex_olmo", (95, 32, 2, 4, 4, 14), (5, 2)),
        norm_topk_prob=True,
        attention_bias=True,
        rope_parameters=_rope(1e4, **_YARN),
    ),
    # gpt_oss: the window and the length before yarn are shorter than most prompts
    "gpt-oss-yarn": _mixture(
        *("gpt_oss", (107, 28, 3, 6, 2, 22), (7, 3)),
        number="num_local_experts",
        head_dim=10,
        sliding_window=9,
        rope_parameters=_rope(1.5e5, **_YARN, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "gpt-oss-full-first-no-bias": _mixture(
        *("gpt_oss", (93, 24, 3, 4, 4, 18), (5, 1)),
        number="num_local_experts",
        head_dim=8,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=False,
        rope_parameters=_rope(1e4),
    ),
    "gpt-oss-multi-query-tied": _mixture(
        *("gpt_oss", (111, 20, 2, 5, 1, 26), (4, 4)),
        number="num_local_experts",
        head_dim=6,
        sliding_window=17,
        swiglu_limit=0.9,
        tie_word_embeddings=True,
        rope_parameters=_rope(5e2, **_YARN, truncate=False),
    ),
}

# Shapes of models with an encoder. Fields that begin with "_" say how encoders.py writes the checkpoint.
ENCODER_SHAPES: dict[str, dict[str, Any]] = {
    # t5: tied, as the first T5
    "t5-relu": _t5("t5", 103, 24, (3, 2), 3, 10, 50, _older=True),
    "t5-few-buckets": _t5(
        *("t5", 127, 20, (1, 3), 2, 8, 36),
        **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
        _generation_config={"decoder_start_token_id": 5},
    ),
    "t5-gelu-copies": _t5("t5", 89, 28, (2, 3), 4, 9, 40, feed_forward_proj="gelu", _copies=True),
    # t5: gated, with a separate head, as version 1.1 and FLAN
    "t5-gated": _t5(
        *("t5", 101, 24, (2, 3), 4, 5, 36),
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "_untied": True, "_older": True},
    ),
    "t5-gated-spelling": _t5(
        *("t5", 113, 20, (3, 1), 2, 12, 33),
        **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "_untied": True},
    ),
    "t5-gated-silu-no-head": _t5(
        *("t5", 97, 24, (2, 2), 3, 6, 40),
        **{"feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5},
    ),
    # mt5
    "mt5-untied": _t5("mt5", 131, 24, (2, 3), 3, 7, 30, _untied=True, _older=True),
    "mt5-newer": _t5("mt5", 109, 20, (3, 2), 4, 6, 44, _untied=True),
    "mt5-relu-no-head": _t5("mt5", 95, 26, (1, 2), 2, 11, 38, feed_forward_proj="gated-relu"),
    # umt5
    "umt5-untied": _t5("umt5", 121, 24, (3, 2), 3, 9, 30, _untied=True, _older=True),
    "umt5-tied-scaled": _t5("umt5", 99, 20, (2, 3), 2, 8, 40),
    "umt5-few-buckets": _t5(
        *("umt5", 107, 22, (1, 3), 4, 5, 35),
        **{"relative_attention_num_buckets": 12, "relative_attention_max_distance": 40},
        **{"_untied": True, "_older": True},
    ),
    # bart
    "bart-gelu": _bart("bart", 111, 24, (2, 3), 3, (40, 50), forced_eos_token_id=2, forced_bos_token_id=0),
    "bart-relu-scaled": _bart(
        *("bart", 125, 20, (3, 1), 2, (50, 36)),
        **{"activation_function": "relu", "scale_embedding": True, "_copies": True},
        forced_eos_token_id=None,
    ),
    "bart-bare": _bart(
        *("bart", 93, 28, (1, 2), 4, (44, 44)),
        **{"_without_prefix": "model.", "_lacks": ("final_logits_bias",), "_loads": False},
        _fields={"architectures": ["BartModel"]},
    ),
    # mbart
    "mbart-scaled": _bart("mbart", 115, 24, (2, 3), 4, (42, 30), scale_embedding=True),
    "mbart-relu": _bart(
        "mbart", 91, 20, (3, 2), 2, (30, 48), activation_function="relu", forced_eos_token_id=None
    ),
    "mbart-forced": _bart(
        *("mbart", 129, 27, (1, 3), 3, (40, 40)),
        _generation_config={"decoder_start_token_id": 2, "forced_bos_token_id": 7, "forced_eos_token_id": 2},
    ),
    # pegasus
    "pegasus-relu": _bart(
        *("pegasus", 105, 24, (2, 3), 3, (40, 50)),
        **{"activation_function": "relu", "scale_embedding": True, "decoder_start_token_id": 0},
    ),
    "pegasus-gelu": _bart("pegasus", 117, 20, (3, 2), 2, (30, 40), forced_eos_token_id=None),
    "pegasus-no-table": _bart(
        *("pegasus", 123, 26, (1, 2), 2, (44, 30)), _lacks=("embed_positions.weight",), scale_embedding=True
    ),
}
