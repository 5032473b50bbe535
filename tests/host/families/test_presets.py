"""Presets of published decoders: their published numbers of parameters, and their published config.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orca_jax.families.hf_config import read_config
from orca_jax.families.presets import PRESETS
from orca_jax.families.registry import FAMILIES
from orca_jax.planning.cost_model import parameter_count
from tests.host.families.published_checkpoints import PUBLISHED as CHECKPOINTS
from tests.places import ROOT

# Presets whose published files are in published_checkpoints.py.
PAGES = {
    name: CHECKPOINTS[page]
    for name, page in {
        "olmo-3-7b": "allenai/Olmo-3-1025-7B",
        "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
        "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "glm-4-9b": "zai-org/GLM-4-9B-0414",
        "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
        "exaone-4.0-32b": "LGAI-EXAONE/EXAONE-4.0-32B",
        "ernie-4.5-0.3b": "baidu/ERNIE-4.5-0.3B-PT",
        "mistral-small-3.1-24b": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "ministral-3-8b": "mistralai/Ministral-3-8B-Base-2512",
        "afm-4.5b": "arcee-ai/AFM-4.5B-Base",
        "apertus-8b": "swiss-ai/Apertus-8B-2509",
        "kimi-k2.5": "moonshotai/Kimi-K2.5",
        "glm-4.5": "zai-org/GLM-4.5",
        "glm-4.5-air": "zai-org/GLM-4.5-Air",
        "minimax-m2": "MiniMaxAI/MiniMax-M2",
        "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3.5-27b": "Qwen/Qwen3.5-27B",
        "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
        "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
        "lfm2-8b-a1b": "LiquidAI/LFM2-8B-A1B",
        "granite-4.0-h-tiny": "ibm-granite/granite-4.0-h-tiny",
        "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
        "bamba-9b": "ibm-ai-platform/Bamba-9B-v1",
        "gemma-4-e2b": "google/gemma-4-E2B-it",
        "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
        "gemma-4-31b": "google/gemma-4-31B-it",
        "falcon-h1-0.5b": "tiiuae/Falcon-H1-0.5B-Instruct",
        "nemotron-nano-9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    }.items()
}

# What the Hugging Face hub counts in the safetensors (8.03B is 8,030,261,248); a tied head counts once.
# Published for Gemma 3 27B are 27,432,406,640, with the vision tower and its projection, which are not here.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 6_194_304,
    "mistral-7b-v0.1": 7_241_732_096,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    **{name: published.parameters for name, published in PAGES.items()},
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    # 20.91B and 116.83B, as the model card says; the hub counts packed bytes.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # As transformers counts them, and the corrections.
    "deepseek-v3": 671_026_404_352 + 58 * 256,
    "deepseek-v3.2": 671_877_929_216 + 58 * 256,
    "glm-5": 743_911_199_232 + 75 * 256,
    "glm-5.2": 743_377_000_704 + 75 * 256,
}


def llama3(
    hidden: int, layers: int, heads: int, ffn: int, factor: float = 8.0, **other: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        **other,
    }


def qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def gemma3(**sizes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
        **sizes,
    }


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    }


# What changes the mathematics in the base models' config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": llama3(2048, 16, 32, 8192, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": llama3(4096, 32, 32, 14336),
    "llama-3.1-70b": llama3(8192, 80, 64, 28672),
    "llama-3.1-405b": llama3(16384, 126, 128, 53248),
    "qwen3-0.6b": qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": qwen3(4096, 36, 32, 12288),
    "qwen3-32b": qwen3(5120, 64, 64, 25600),
    "gemma-3-1b": gemma3(
        head_dim=256,
        hidden_size=1152,
        intermediate_size=6912,
        max_position_embeddings=32768,
        num_attention_heads=4,
        num_hidden_layers=26,
        num_key_value_heads=1,
        query_pre_attn_scalar=256,
        rope_scaling=None,
        sliding_window=512,
        vocab_size=262144,
    ),
    "gemma-3-27b": gemma3(  # its text_config, with transformers' defaults
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
        vocab_size=262208,
    ),
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "phi-4": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 100257,
        "eos_token_id": 100265,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "olmo-2-7b": {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    **{name: published.config for name, published in PAGES.items()},
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": qwen3(2048, 48, 32, 6144)
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
CONFIGS["deepseek-v3.2"] = {
    name: value for name, value in CONFIGS["deepseek-v3"].items() if name != "auto_map"
} | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
}
CONFIGS["glm-5"] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
# Layers 0, 1, 2, 6, 10, ... have an indexer of their own.
CONFIGS["glm-5.2"] = CONFIGS["glm-5"] | {
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full" if i < 2 or i % 4 == 2 else "shared" for i in range(78)],
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}


def test_every_preset_is_in_the_document_and_in_the_tests() -> None:
    assert list(PUBLISHED) == list(CONFIGS)
    gpt3 = ["gpt3-13b", "gpt3-101b", "gpt3-175b", "gpt3-341b"]
    t5 = ["t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b", "flan-t5-xl"]
    packed = ["gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4"]
    published = [*PUBLISHED][:-4] + packed + ["deepseek-v3", "deepseek-v3.2", "glm-5", "glm-5.2"]
    assert list(PRESETS) == ["demo", "gpt2", "gpt2-xl", *gpt3, *published, *t5, "bart-large"]
    for name in packed:
        assert PRESETS[name] == PRESETS[name.removesuffix("-mxfp4")].with_packed_experts()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_is_what_its_family_reads_from_the_published_config(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    if config["model_type"] not in FAMILIES:
        pytest.skip(f"there is no family {config['model_type']}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).with_forms({}) == PRESETS[name]  # some are published quantized


def test_every_preset_is_documented() -> None:
    (section,) = re.findall(r"^## Presets\n(.*?)^## ", (ROOT / "docs/plan.md").read_text(), re.S | re.M)
    assert re.findall(r"`([a-z0-9.-]+)`(?=[^|\n]*\|[^|\n]*\|$)", section, re.M) == list(PRESETS)
