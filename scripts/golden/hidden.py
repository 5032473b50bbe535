"""Make tests/data/golden/hidden.npz: Hugging Face's final hidden states of the golden models.

It takes one model of each family, with its shortest and longest prompt and the prompts whose logits are kept.
tests/device/model/golden_hidden.py describes the file. The model is the one without its head (`base_model`),
in float32; its last hidden states are compared with those of the same model in float64 before anything is
written.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.golden.decoders import class_of, switching_length
from scripts.golden.with_torch import GOLDEN, versions

PATH = GOLDEN / "hidden.npz"
ROUNDING = 5e-5


def chosen() -> list[Path]:
    """The directory of the first model of each family, by name; those with an encoder have no golden.npz."""
    first: dict[str, Path] = {}
    for path in sorted(GOLDEN.glob("*/golden.npz")):
        family = json.loads((path.parent / "config.json").read_text())["model_type"]
        first.setdefault(family, path.parent)
    return list(first.values())


def hidden_states(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Hidden states [n, size], with the padding of decoders.logits_of."""
    with torch.no_grad():
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        if switching_length(model.config) is not None:
            ids = torch.nn.functional.pad(ids, (0, model.config.max_position_embeddings - len(token_ids)))
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        return states[0, : len(token_ids)].double().numpy()


def make_files(only: Sequence[str]) -> None:
    """Write the file and print one line a model; with `only` those of other models stay as they are."""
    arrays: dict[str, np.ndarray] = {}
    if only:
        with np.load(PATH) as file:
            arrays = dict(file)
    for directory in chosen():
        if only and directory.name not in only:
            continue
        with np.load(directory / "golden.npz") as golden:
            lengths = golden["prompt_lengths"]
            prompts = np.split(golden["prompt_tokens"], np.cumsum(lengths)[:-1])
            rows = sorted({*golden["logits_rows"].tolist(), int(lengths.argmin()), int(lengths.argmax())})
        own = json.loads((directory / "config.json").read_text())
        # Only the plain form of experts has float64.
        experts = {"experts_implementation": "eager"} if {"num_experts_per_tok", "moe_k"} & own.keys() else {}
        whole = class_of(own["model_type"]).from_pretrained(
            directory,
            attn_implementation="sdpa" if own.get("alibi") else "eager",
            dtype=torch.float32,
            **experts,
        )
        # Llama 4's prefix is that of the whole model with vision.
        model = (whole.model if whole.base_model is whole else whole.base_model).eval()
        states = [hidden_states(model, prompts[row]) for row in rows]
        model.double()
        exact = [hidden_states(model, prompts[row]) for row in rows]
        worst = max(float(np.abs(a - b).max()) for a, b in zip(states, exact, strict=True))
        assert worst < ROUNDING, f"{directory.name}: rounding moves a hidden state by {worst}"
        name = directory.name
        arrays[f"{name}.rows"] = np.array(rows, np.int32)
        arrays[f"{name}.last"] = np.stack([one[-1] for one in states]).astype(np.float32)
        arrays[f"{name}.mean"] = np.stack([one.mean(axis=0) for one in states]).astype(np.float32)
        size = arrays[f"{name}.last"].shape[1]
        print(f"{name:30} {len(rows)} prompts, {size} numbers, rounding {worst:.1e}", flush=True)
    arrays["versions"] = np.array([f"{name} {versions()[name]}" for name in ("torch", "transformers")])
    np.savez_compressed(PATH, allow_pickle=False, **arrays)
