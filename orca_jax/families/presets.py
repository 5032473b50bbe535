"""Shapes by name, without weights, which `--load-format dummy` draws at random. No JAX.

They are the demo model, GPT-2, the models of the paper's Table 1, and published models. Each is the
config.json of such a model without the fields that have their family's default. The tests compare them with
the published files and numbers of parameters.
"""

from dataclasses import replace
from typing import Any

from orca_jax.families.hf_config import model_of
from orca_jax.families.model_config import ModelConfig

_Fields = dict[str, Any]
_GPT2: _Fields = {
    "model_type": "gpt2",
    "vocab_size": 50_257,
    "n_positions": 1024,
    "bos_token_id": 50_256,
    "eos_token_id": 50_256,
}
_LLAMA3: _Fields = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_LLAMA3_SCALING: _Fields = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3: _Fields = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
_QWEN3_5: _Fields = {
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "eos_token_id": 248_044,
    "rope_theta": 1e7,
}
_GRANITE4: _Fields = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "max_position_embeddings": 131_072,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_state": 128,
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 1 / 128,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
    "bos_token_id": 100_257,
    "eos_token_id": 100_257,
}
_GEMMA3: _Fields = {"model_type": "gemma3_text", "bos_token_id": 2, "eos_token_id": 1}
_MISTRAL: _Fields = {
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK_V3: _Fields = {
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_GPT_OSS: _Fields = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "eos_token_id": 200_002,
}
_T5: _Fields = {"model_type": "t5", "vocab_size": 32_128, "d_kv": 64, "eos_token_id": 1}


def _gpt2(hidden_size: int, n_layers: int, n_heads: int, **other: Any) -> ModelConfig:
    return model_of({**_GPT2, "n_embd": hidden_size, "n_layer": n_layers, "n_head": n_heads, **other})


def _gpt3(hidden_size: int, n_layers: int) -> ModelConfig:
    """A model of Table 1: heads of 128, 2048 positions, GPT-2's vocabulary padded for hardware and shards."""
    model = _gpt2(hidden_size, n_layers, hidden_size // 128, n_positions=2048)
    return replace(model, vocab_multiple=128)


def _sized(
    base: _Fields, hidden_size: int, n_layers: int, n_heads: int, ffn_size: int, **other: Any
) -> _Fields:
    return {
        **base,
        "hidden_size": hidden_size,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "intermediate_size": ffn_size,
        **other,
    }


def _llama3(*sizes: int, factor: float = 8.0, **other: Any) -> ModelConfig:
    scaling = _LLAMA3_SCALING | {"factor": factor}
    return model_of(_sized(_LLAMA3, *sizes, rope_scaling=scaling, **other))


def _qwen3(*sizes: int, **other: Any) -> ModelConfig:
    return model_of(_sized(_QWEN3, *sizes, **other))


def _qwen3_5_moe(hidden_size: int, n_layers: int, n_heads: int, inner: int, **other: Any) -> ModelConfig:
    """A mixture of Qwen 3.5 whose shared expert is as wide as the others, `inner`."""
    inners = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    fields = _sized(_QWEN3_5, hidden_size, n_layers, n_heads, inner, num_key_value_heads=2)
    return model_of({"model_type": "qwen3_5_moe_text", **fields, **inners, **other})


def _gemma4(*sizes: int, **other: Any) -> ModelConfig:
    larger: dict[str, Any] = {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "max_position_embeddings": 262_144,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
    }
    return model_of(_sized(larger, *sizes, **other))


def _granite4(*sizes: int, **other: Any) -> ModelConfig:
    return model_of(_sized(_GRANITE4, *sizes, **other))


def _nemotron(kinds: str, hidden_size: int, n_heads: int, n_kv_heads: int, **other: Any) -> ModelConfig:
    sizes = {"hidden_size": hidden_size, "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}
    return model_of(
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": kinds,
            "vocab_size": 131_072,
            "bos_token_id": 1,
            **sizes,
            **other,
        }
    )


def _gpt_oss(n_layers: int, n_experts: int) -> ModelConfig:
    return model_of({**_GPT_OSS, "num_hidden_layers": n_layers, "num_local_experts": n_experts})


def _glm5(n_positions: int, rope_theta: float, **other: Any) -> ModelConfig:
    """GLM-5, of which later versions have longer contexts, and layers that share what an indexer selects."""
    return model_of(
        {
            "model_type": "glm_moe_dsa",
            "vocab_size": 154_880,
            "max_position_embeddings": n_positions,
            "hidden_size": 6144,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rope_theta": rope_theta,
            **other,
        }
    )


def _glm45(
    hidden_size: int, n_layers: int, ffn_size: int, expert_size: int, n_experts: int, **other: Any
) -> ModelConfig:
    return model_of(
        _sized(
            {"model_type": "glm4_moe"},
            *(hidden_size, n_layers, 96, ffn_size),
            vocab_size=151_552,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            head_dim=128,
            attention_bias=True,
            rope_theta=1e6,
            moe_intermediate_size=expert_size,
            n_routed_experts=n_experts,
            num_experts_per_tok=8,
            eos_token_id=[151_329, 151_336, 151_338],
            **other,
        )
    )


def _t5(hidden_size: int, n_layers: int, n_heads: int, ffn_size: int, **other: Any) -> ModelConfig:
    sizes = {"d_model": hidden_size, "num_layers": n_layers, "num_heads": n_heads, "d_ff": ffn_size}
    return model_of({**_T5, **sizes, **other})


PRESETS: dict[str, ModelConfig] = {
    "demo": _gpt2(256, 4, 4, vocab_size=2048, n_positions=512, bos_token_id=0, eos_token_id=0),
    "gpt2": _gpt2(768, 12, 12),  # 124M
    "gpt2-xl": _gpt2(1600, 48, 25),  # 1.6B
    "gpt3-13b": _gpt3(5120, 40),
    "gpt3-101b": _gpt3(10_240, 80),
    "gpt3-175b": _gpt3(12_288, 96),
    "gpt3-341b": _gpt3(15_360, 120),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, factor=32.0, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
    "gemma-3-1b": model_of(
        _sized(
            _GEMMA3,
            *(1152, 26, 4, 6912),
            vocab_size=262_144,
            max_position_embeddings=32_768,
            num_key_value_heads=1,
            sliding_window=512,
        )
    ),
    "gemma-3-27b": model_of(
        _sized(
            _GEMMA3,
            *(5376, 62, 32, 21_504),
            vocab_size=262_208,
            max_position_embeddings=131_072,
            num_key_value_heads=16,
            head_dim=128,
            query_pre_attn_scalar=168,
            sliding_window=1024,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    ),
    # 4.63 billion parameters of text, half of them in the layers' own embeddings; 25.2, 3.8 active; 30.7.
    "mistral-7b-v0.1": model_of({"model_type": "mistral", **_MISTRAL}),
    "phi-4": model_of(
        {
            "model_type": "phi3",
            "vocab_size": 100_352,
            "max_position_embeddings": 16_384,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "intermediate_size": 17_920,
            "rope_theta": 250_000.0,
            "bos_token_id": 100_257,
            "eos_token_id": 100_265,
        }
    ),
    "olmo-2-7b": model_of(
        {
            "model_type": "olmo2",
            "vocab_size": 100_352,
            "max_position_embeddings": 4096,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11_008,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 100_257,
        }
    ),
    "olmo-3-7b": model_of(
        _sized(
            {"model_type": "olmo3"},
            *(4096, 32, 32, 11_008),
            vocab_size=100_278,
            max_position_embeddings=65_536,
            rms_norm_eps=1e-6,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
            },
            eos_token_id=100_257,
        )
    ),
    "smollm3-3b": model_of(
        _sized(
            {"model_type": "smollm3"},
            *(2048, 36, 16, 11_008),
            vocab_size=128_256,
            max_position_embeddings=65_536,
            num_key_value_heads=4,
            rope_theta=5e6,
            bos_token_id=128_000,
            eos_token_id=128_012,
        )
    ),
    "seed-oss-36b": model_of(
        _sized(
            {"model_type": "seed_oss"},
            *(5120, 64, 80, 27_648),
            vocab_size=155_136,
            max_position_embeddings=524_288,
            num_key_value_heads=8,
            rope_theta=1e7,
            bos_token_id=0,
            eos_token_id=2,
        )
    ),
    "glm-4-9b": model_of(
        _sized(
            {"model_type": "glm4"},
            *(4096, 40, 32, 13_696),
            vocab_size=151_552,
            max_position_embeddings=32_768,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            eos_token_id=[151_329, 151_336, 151_338],
        )
    ),
    "command-r7b": model_of(
        _sized(
            {"model_type": "cohere2"},
            *(4096, 32, 32, 14_336),
            vocab_size=256_000,
            max_position_embeddings=8192,
            num_key_value_heads=8,
            logit_scale=0.25,
            rope_theta=5e4,
            bos_token_id=5,
            eos_token_id=255_001,
        )
    ),
    "exaone-4.0-32b": model_of(
        _sized(
            {"model_type": "exaone4"},
            *(5120, 64, 40, 27_392),
            vocab_size=102_400,
            max_position_embeddings=131_072,
            num_key_value_heads=8,
            rope_theta=1e6,
            rope_scaling=_LLAMA3_SCALING | {"factor": 16.0},
            bos_token_id=1,
            eos_token_id=361,
        )
    ),
    "ernie-4.5-0.3b": model_of(
        _sized(
            {"model_type": "ernie4_5"},
            *(1024, 18, 16, 3072),
            vocab_size=103_424,
            max_position_embeddings=131_072,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "mistral-small-3.1-24b": model_of(
        _MISTRAL
        | {
            "model_type": "mistral",
            "vocab_size": 131_072,
            "max_position_embeddings": 131_072,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "head_dim": 128,
            "intermediate_size": 32_768,
            "rope_theta": 1e9,
            "sliding_window": None,
        }
    ),
    "ministral-3-8b": model_of(
        _MISTRAL
        | {
            "model_type": "ministral3",
            "vocab_size": 131_072,
            "max_position_embeddings": 262_144,
            "num_hidden_layers": 34,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
    "afm-4.5b": model_of(
        _sized(
            {"model_type": "arcee"},
            *(2560, 36, 20, 18_432),
            vocab_size=128_004,
            max_position_embeddings=65_536,
            num_key_value_heads=4,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 20.0,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
            },
            bos_token_id=128_000,
            eos_token_id=128_001,
        )
    ),
    "apertus-8b": model_of(
        _sized(
            {"model_type": "apertus"},
            *(4096, 32, 32, 21_504),
            vocab_size=131_072,
            max_position_embeddings=65_536,
            num_key_value_heads=8,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    # The text, 1.03 trillion parameters, 32 billion active; published with experts of four bits.
    "kimi-k2.5": model_of(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 163_840,
            "max_position_embeddings": 262_144,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.827,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "bos_token_id": 163_584,
            "eos_token_id": 163_585,
        }
    ),
    # 353 billion parameters, 32 active; Air 107, 12 active: without the layers that predict further tokens.
    "glm-4.5": _glm45(
        *(5120, 92, 12_288, 1536, 160),
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm-4.5-air": _glm45(4096, 46, 10_944, 1408, 128),
    "minimax-m2": model_of(
        _sized(
            {"model_type": "minimax_m2"},
            *(3072, 62, 48, 1536),
            vocab_size=200_064,
            max_position_embeddings=196_608,
            num_key_value_heads=8,
            num_local_experts=256,
            num_experts_per_tok=8,
            rotary_dim=64,
        )
    ),
    # Hybrids of Qwen without the layer that predicts further tokens, and without vision.
    "qwen3-next-80b-a3b": _qwen3(
        *(2048, 48, 16, 5120),
        model_type="qwen3_next",
        max_position_embeddings=262_144,
        num_key_value_heads=2,
        head_dim=256,
        rope_theta=1e7,
        num_experts=512,
        num_experts_per_tok=10,
    ),
    "qwen3.5-27b": model_of(
        _sized(
            {"model_type": "qwen3_5_text", **_QWEN3_5},
            *(5120, 64, 24, 17_408),
            num_key_value_heads=4,
            linear_num_value_heads=48,
        )
    ),
    "qwen3.5-35b-a3b": _qwen3_5_moe(2048, 40, 16, 512, num_experts=256, num_experts_per_tok=8),
    "qwen3.5-397b-a17b": _qwen3_5_moe(
        *(4096, 60, 32, 1024), num_experts=512, num_experts_per_tok=10, linear_num_value_heads=64
    ),
    "lfm2-8b-a1b": model_of(
        _sized(
            {"model_type": "lfm2_moe"},
            *(2048, 24, 32, 7168),
            vocab_size=65_536,
            max_position_embeddings=128_000,
            num_key_value_heads=8,
            layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            moe_intermediate_size=1792,
            num_experts=32,
            num_experts_per_tok=4,
            bos_token_id=1,
            eos_token_id=7,
        )
    ),
    "granite-4.0-h-tiny": _granite4(
        *(1536, 40, 12, 512),
        num_key_value_heads=4,
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        logits_scaling=6,
    ),
    "granite-4.0-h-small": _granite4(
        *(4096, 40, 32, 768),
        num_key_value_heads=8,
        shared_intermediate_size=1536,
        num_local_experts=72,
        num_experts_per_tok=10,
        logits_scaling=16,
    ),
    "bamba-9b": model_of(
        _sized(
            {"model_type": "bamba"},
            *(4096, 32, 32, 14_336),
            vocab_size=128_256,
            max_position_embeddings=262_144,
            num_key_value_heads=8,
            attn_layer_indices=[9, 18, 27],
            mamba_d_state=128,
            bos_token_id=128_000,
            eos_token_id=128_001,
        )
    ),
    "gemma-4-e2b": _gemma4(
        *(1536, 35, 8, 6144),
        max_position_embeddings=131_072,
        num_key_value_heads=1,
        layer_types=["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(35)],
        num_kv_shared_layers=20,
        hidden_size_per_layer_input=256,
        sliding_window=512,
        use_double_wide_mlp=True,
        attention_k_eq_v=False,
    ),
    "gemma-4-26b-a4b": _gemma4(
        *(2816, 30, 16, 2112),
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma4(
        *(5376, 60, 32, 21_504),
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
    "falcon-h1-0.5b": model_of(
        _sized(
            {"model_type": "falcon_h1"},
            *(1024, 36, 8, 2048),
            vocab_size=32_784,
            max_position_embeddings=16_384,
            num_key_value_heads=2,
            head_dim=64,
            rope_theta=1e11,
            attention_out_multiplier=0.9375,
            key_multiplier=0.390625,
            embedding_multiplier=5.656854249492381,
            lm_head_multiplier=0.0390625,
            mlp_multipliers=[0.8838834764831844, 0.5859375],
            ssm_in_multiplier=1.25,
            ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            ssm_out_multiplier=0.23570226039551587,
            mamba_d_ssm=1536,
            mamba_d_state=128,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_norm_before_gate=False,
            bos_token_id=1,
            eos_token_id=11,
        )
    ),
    # 8.89 billion parameters; 31.6 billion, 3.6 active.
    "nemotron-nano-9b-v2": _nemotron(
        *("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, 40, 8),
        intermediate_size=15_680,
        mamba_head_dim=80,
        max_position_embeddings=131_072,
        eos_token_id=12,
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        *("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 32, 2),
        mamba_num_heads=64,
        max_position_embeddings=262_144,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
        eos_token_id=2,
    ),
    # The text, 107.8 billion parameters, 17 active.
    "llama-4-scout": model_of(
        {
            "model_type": "llama4_text",
            "vocab_size": 202_048,
            "max_position_embeddings": 10_485_760,
            "hidden_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "num_local_experts": 16,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": 200_000,
            "eos_token_id": [200_001, 200_007, 200_008],
        }
    ),
    "mixtral-8x7b": model_of(
        {
            "model_type": "mixtral",
            **_MISTRAL,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    ),
    "qwen3-30b-a3b": _qwen3(
        *(2048, 48, 32, 6144),
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        moe_intermediate_size=768,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b-mxfp4": _gpt_oss(24, 32).with_packed_experts(),
    "gpt-oss-120b-mxfp4": _gpt_oss(36, 128).with_packed_experts(),
    # Also R1; 671 billion parameters, 37 active, without the layers that predict further tokens.
    "deepseek-v3": model_of({**_DEEPSEEK_V3, "model_type": "deepseek_v3", "n_shared_experts": 1}),
    # DeepSeek-V3 with an indexer, 672 billion parameters; GLM-5, 744 billion, 40 active.
    "deepseek-v3.2": model_of({**_DEEPSEEK_V3, "model_type": "deepseek_v32"}),
    "glm-5": _glm5(202_752, 1e6),
    "glm-5.2": _glm5(1_048_576, 8e6, index_topk_freq=4, index_skip_topk_offset=3),
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "t5-3b": _t5(1024, 24, 32, 16_384, d_kv=128),
    "t5-11b": _t5(1024, 24, 128, 65_536, d_kv=128),
    "flan-t5-xl": _t5(2048, 24, 32, 5120, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bart-large": model_of(
        {
            "model_type": "bart",
            "vocab_size": 50_265,
            "max_position_embeddings": 1024,
            "d_model": 1024,
            "encoder_layers": 12,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_layers": 12,
            "decoder_attention_heads": 16,
            "decoder_ffn_dim": 4096,
            "decoder_start_token_id": 2,
            "forced_bos_token_id": 0,
            "forced_eos_token_id": 2,
            "bos_token_id": 0,
            "eos_token_id": 2,
        }
    ),
}
