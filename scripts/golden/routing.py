"""Make tests/data/golden/routing.npz: the experts that Hugging Face chooses in golden mixtures.

tests/device/model/golden_routing.py describes the file.
The experts are the best of the router logits that the model returns with `output_router_logits`, in float32.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from scripts.golden.with_torch import GOLDEN, versions

# Families whose routers choose the best logits.
FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def make_files(only: Sequence[str]) -> None:
    """Write the file and print one line a model."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(GOLDEN.glob("*/golden.npz")):
        directory, name = path.parent, path.parent.name
        config = json.loads((directory / "config.json").read_text())
        if config["model_type"] not in FAMILIES:
            continue
        with np.load(path) as golden:
            prompts = np.split(golden["prompt_tokens"], np.cumsum(golden["prompt_lengths"])[:-1])
            rows = golden["logits_rows"].tolist()
        model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, experts_implementation="eager"
        ).eval()
        chosen, gaps = list[np.ndarray](), list[np.ndarray]()
        top_k = config["num_experts_per_tok"]
        for row in rows:
            ids = torch.from_numpy(prompts[row].astype(np.int64))[None]
            with torch.no_grad():
                out = model(input_ids=ids, use_cache=False, output_router_logits=True)
            logits = torch.stack([one.reshape(ids.shape[1], -1) for one in out.router_logits], dim=1)
            logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # all experts are chosen
            best = logits.topk(top_k + 1, dim=-1)
            chosen.append(best.indices[..., :top_k].numpy().astype(np.uint8))
            gaps.append((best.values[..., top_k - 1] - best.values[..., top_k]).numpy())
        arrays[f"{name}.chosen"] = np.concatenate(chosen)
        arrays[f"{name}.gaps"] = np.concatenate(gaps).astype(np.float32)
        print(f"{name:40} {arrays[f'{name}.chosen'].shape}", flush=True)
    arrays["versions"] = np.array([f"{name} {versions()[name]}" for name in ("torch", "transformers")])
    np.savez_compressed(GOLDEN / "routing.npz", allow_pickle=False, **arrays)
