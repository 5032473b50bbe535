"""Make tests/data/text_parts: small random models of text and pictures, and transformers' tokens for texts.

Each model has a directory as transformers saves it, with the vision tower, and golden.json: prompts of token
ids, and the greedy continuation of each in float32.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from scripts.golden.with_torch import REPOSITORY, versions

TARGET = REPOSITORY / "tests" / "data" / "text_parts"
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "image_size": 28,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "vision_use_head": False,
}
MISTRAL3: dict[str, Any] = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 8,
        "image_size": 28,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
    },
}
QWEN3_5: dict[str, Any] = {
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "num_position_embeddings": 4,
        "out_hidden_size": 24,
        "patch_size": 4,
    },
}
QWEN3_5_TEXT: dict[str, Any] = {
    "vocab_size": 109,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 105,
        "eoi_token_index": 106,
        "image_token_index": 107,
        "mm_tokens_per_image": 4,
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 113,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "query_pre_attn_scalar": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 6,
        },
        "vision_config": VISION,
    },
    "gemma4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "eos_token_id": [1, 106],
        "image_token_id": 107,
        "video_token_id": 108,
        "audio_token_id": 109,
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": 113,
            "vocab_size_per_layer_input": 113,
            "hidden_size": 32,
            "intermediate_size": 36,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "max_position_embeddings": 128,
            "sliding_window": 6,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "num_hidden_layers": 1,
            "patch_size": 4,
        },
    },
    "llama4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 105,
        "eoi_token_index": 106,
        "image_token_index": 107,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama4_text",
            "vocab_size": 113,
            "hidden_size": 24,
            "intermediate_size": 16,
            "intermediate_size_mlp": 28,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "floor_scale": 7,
            "max_position_embeddings": 128,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "image_size": 8,
            "patch_size": 4,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
        },
    },
    "mistral3-mistral": {
        **MISTRAL3,
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 107,
            "hidden_size": 24,
            "intermediate_size": 36,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "rope_theta": 1e9,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    },
    "mistral3-ministral3": {
        **MISTRAL3,
        "text_config": {
            "model_type": "ministral3",
            "vocab_size": 113,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
            "tie_word_embeddings": False,
        },
    },
    "mistral3-mistral4": {
        **MISTRAL3,
        "text_config": {
            "model_type": "mistral4",
            "vocab_size": 109,
            "hidden_size": 24,
            "intermediate_size": 32,
            "moe_intermediate_size": 10,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 2.0,
            },
            "tie_word_embeddings": False,
        },
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "projection_hidden_size": 8,
        "image_token_id": 102,
        "video_token_id": 103,
        "vision_start_token_id": 104,
        "vision_end_token_id": 105,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "deepseek_v3",
            "vocab_size": 101,
            "hidden_size": 24,
            "intermediate_size": 32,
            "moe_intermediate_size": 10,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.827,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e4,
            "rope_scaling": {
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
        },
    },
    "qwen3-5": QWEN3_5
    | {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", "intermediate_size": 40, **QWEN3_5_TEXT},
    },
    "qwen3-5-moe": QWEN3_5
    | {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
            **QWEN3_5_TEXT,
        },
    },
}


def make_files(only: Sequence[str]) -> None:
    """Write the directories and print one line for each."""
    for name, fields in MODELS.items():
        if only and name not in only:
            continue
        directory = TARGET / name
        shutil.rmtree(directory, ignore_errors=True)
        torch.manual_seed(7)
        config = AutoConfig.for_model(**fields)
        # The grouped product of experts needs multiples of 16 bytes.
        plain = {"experts_implementation": "eager"} if "n_routed_experts" in fields["text_config"] else {}
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", **plain)
        model = model.float().eval()
        with torch.no_grad():
            for each, parameter in model.named_parameters():
                spread = 0.1 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
                if "embed_tokens" in each:  # otherwise the tied head would repeat the input
                    spread = 0.15
                parameter.copy_(torch.randn_like(parameter) * spread)
                if "norm" in each and name in ("gemma4", "llama4"):
                    parameter += 1.0
        model.save_pretrained(directory)
        prompts = [torch.randint(2, 100, (length,)).tolist() for length in (1, 3, 7, 20, 40)]
        # transformers 5.24 cannot run Llama 4 with vision: its text's results have no pictures'.
        text = model.language_model if name == "llama4" else model
        rows = [{"prompt": prompt, "token_ids": _greedy(text, prompt)} for prompt in prompts]
        golden = {name: versions()[name] for name in ("transformers", "torch")} | {"rows": rows}
        (directory / "golden.json").write_text(json.dumps(golden))
        print(f"{directory}: {len(rows)} prompts")


def _greedy(model: torch.nn.Module, prompt: list[int], n: int = 12) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "rounding could swap the best two"
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :]
