"""A Llama of two small layers, whose cost is nothing beside the host's, with random weights."""

import json
import shutil
from pathlib import Path

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def write_costless_model(folder: Path, tokenizer: Path | None = None) -> Path:
    """Make the model's folder, with the tokenizer of another model of at most 49,152 tokens if given."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, folder)
    return folder
