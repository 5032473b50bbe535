"""Make tests/data/adapters: LoRA adapters that PEFT saves, of the golden models, and its results with them.

For each of BASES there are adapters of several ranks, with patterns and scales of each kind. The models are
those of `decoders`; tests/device/model/golden_adapters.py describes the files. Needs `peft` besides. Both
matrices are random, since a new adapter's B is zero. Greedy tokens are those of the merged model, alone and
without a cache; log-probabilities those of the model with the adapter beside it.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from scripts.golden.with_torch import GOLDEN, REPOSITORY, SEED, versions

DIRECTORY = REPOSITORY / "tests" / "data" / "adapters"
N_OUTPUT = 6
LONGEST = 24  # tokens of a prompt
N_TOP = 5

_LLAMA: Mapping[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "patterns": {
        "r": 5,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"],
        "rank_pattern": {"v_proj": 17, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"up_proj": 3, "^model.layers.0.self_attn.q_proj": 20},
    },
    "root": {
        "r": 33,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [1],
    },
}
_FUSED: Mapping[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "root": {"r": 18, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
}
# Of the embedding and the head, and of a tied one: PEFT cannot merge two changes into one tied tensor.
_VOCABULARY = {"r": 6, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}
_EXPERTS: Mapping[str, dict[str, Any]] = {
    "experts": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "down": {
        "r": 17,
        "lora_alpha": 30,
        "target_modules": [],
        "target_parameters": ["mlp.experts.down_proj"],
    },
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]},
}
BASES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "llama-grouped": {**_LLAMA, "vocabulary": _VOCABULARY},
    "gpt2-tied-gelu-new": {
        **_FUSED,
        "vocabulary": {"r": 6, "lora_alpha": 9, "target_modules": ["wte", "lm_head"]},
    },
    "gemma3-linear": {"vocabulary": {"r": 6, "lora_alpha": 9, "target_modules": ["embed_tokens"]}},
    "mixtral-grouped": _EXPERTS,
    "gpt-neox-partial": _FUSED,
    "phi3-partial-window": _FUSED,
    "gemma2-caps": _FUSED,
    "falcon-new-decoder": _FUSED,
    "qwen3-tied": _FUSED,
}


def _prompts(directory: Path) -> list[np.ndarray]:
    with np.load(directory / "golden.npz") as golden:
        starts = np.cumsum(golden["prompt_lengths"])[:-1]
        every = np.split(golden["prompt_tokens"], starts)
        return [every[row][:LONGEST] for row in golden["logits_rows"]]


def _logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*ids]]), use_cache=False).logits[0].double()


def _results(adapted: Any, merged: Any, prompts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Log-probabilities of each prompt's tokens, and of the most likely first ones; greedy tokens."""
    scores, top_ids, top, outputs, gaps = [], [], [], [], []
    for prompt in prompts:
        logprobs = _logits(adapted, prompt.tolist()).log_softmax(-1)
        scores.append(logprobs[torch.arange(len(prompt) - 1), torch.from_numpy(prompt[1:]).long()])
        best = logprobs[-1].topk(N_TOP)
        top_ids.append(best.indices)
        top.append(best.values)
        ids, own, near = prompt.tolist(), list[int](), list[float]()
        for _ in range(N_OUTPUT):
            two = _logits(merged, ids)[-1].topk(2)
            own.append(int(two.indices[0]))
            near.append(float(two.values[0] - two.values[1]))
            ids.append(own[-1])
        outputs.append(own)
        gaps.append(near)
    return {
        "scores": torch.cat(scores).numpy().astype(np.float32),
        "top_ids": torch.stack(top_ids).numpy().astype(np.int32),
        "top": torch.stack(top).numpy().astype(np.float32),
        "outputs": np.array(outputs, np.int32),
        "gaps": np.array(gaps, np.float32),
    }


def make_files(only: Sequence[str]) -> None:
    """Write the files and print one line a model; with `only` those of other models stay as they are."""
    for base, adapters in BASES.items():
        if only and base not in only:
            continue
        place, source = DIRECTORY / base, GOLDEN / base
        shutil.rmtree(place, ignore_errors=True)
        prompts = _prompts(source)
        arrays = {
            "prompt_tokens": np.concatenate(prompts).astype(np.int32),
            "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        }

        def model(source: Path = source) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()

        for number, (name, fields) in enumerate({"": {}, **adapters}.items()):
            if not name:
                plain = model()
                results = _results(plain, plain, prompts)
            else:
                torch.manual_seed(SEED + number)
                adapted = peft.get_peft_model(
                    model(), peft.LoraConfig(task_type="CAUSAL_LM", **fields)
                ).eval()
                for parameter_name, parameter in adapted.named_parameters():
                    if "lora_" in parameter_name:
                        parameter.data = 0.3 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5
                adapted.save_pretrained(place / name)
                (place / name / "README.md").unlink(missing_ok=True)
                config = place / name / "adapter_config.json"
                values = json.loads(config.read_text()) | {"base_model_name_or_path": base}
                config.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
                again = peft.PeftModel.from_pretrained(model(), place / name).eval()
                merged = again if name == "vocabulary" else adapted.merge_and_unload()
                results = _results(again, merged, prompts)
            arrays |= {f"{name}/{key}": value for key, value in results.items()}
        np.savez_compressed(place / "golden.npz", **arrays)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        print(f"{base}: {len(adapters)} adapters, {size / 1e3:.0f} kB")
    made = versions() | {"peft": peft.__version__}
    (DIRECTORY / "versions.json").write_text(json.dumps(made, indent=1) + "\n")
