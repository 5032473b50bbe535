"""Make tests/data/golden/gpt-oss-mxfp4: a golden model with experts packed in MXFP4, as gpt-oss is published.

Its files are the ones that decoders.py makes. transformers unpacks the experts as it loads them, and
`unpacked.npz` has the first layer's, as float32.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from scripts.golden.decoders import Golden, compute, draw_weights
from scripts.golden.with_torch import GOLDEN, SEED

NAME = "gpt-oss-mxfp4"
BLOCK = 32
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [X, out, in / 32, 16] and scales [X, out, in / 32] near a weight [X, in, out]."""
    by_block = weight.transpose(1, 2).unflatten(-1, (-1, BLOCK))
    exponent = torch.floor(torch.log2(by_block.abs().amax(-1) / 6)) + 1
    scaled = by_block / torch.exp2(exponent)[..., None]
    code = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def make_files(only: Sequence[str]) -> None:
    """Write the directory and print statistics."""
    directory = GOLDEN / NAME
    shutil.rmtree(directory, ignore_errors=True)
    rng = np.random.default_rng([SEED, *NAME.encode()])
    golden = Golden(NAME, AutoConfig.for_model("gpt_oss", **CONFIG), n_prompts=32)
    model = AutoModelForCausalLM.from_config(golden.config).eval().float()
    draw_weights(model, rng)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensors.pop(name))
    safetensors.torch.save_file(
        {name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"}
    )
    path.chmod(0o644)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    experts = model.model.layers[0].mlp.experts
    np.savez_compressed(
        directory / "unpacked.npz",
        gate_up_proj=experts.gate_up_proj.detach().numpy(),
        down_proj=experts.down_proj.detach().numpy(),
    )
    print(compute(golden, model, directory, rng))
