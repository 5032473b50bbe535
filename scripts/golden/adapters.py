"""Make tests/data/adapters: LoRA adapters that PEFT saves, of the golden models, and its results with them.

For each of BASES there are adapters of several ranks, with patterns and scales of each kind. The models are
those of `decoders`; tests/whole/adapters/golden_adapters.py describes the files. Needs `peft` besides. Both
matrices are random, since a new adapter's B is zero. Greedy tokens are those of the merged model, alone and
without a cache; log-probabilities those of the model with the adapter beside it.

DRAWN has at least one model of each other family, with adapters of all linear layers, of the vocabulary and
of experts. Their numbers are drawn by a formula (tests/whole/adapters/drawn_adapters.py), and not stored.
"""

# pyright: reportMissingImports=false

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, Mxfp4Config

from scripts.golden.decoders import class_of
from scripts.golden.encoders import logits_of
from scripts.golden.with_torch import GOLDEN, REPOSITORY, SEED, versions
from tests.whole.adapters.drawn_adapters import drawn, packed

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


# At least one model of each family that BASES lacks; more where the models of a family differ in their parts.
DRAWN = (
    *("opt-post-norm-projection", "mistral-window", "ministral3-yarn-temperature", "gemma-head-size"),
    *("gemma4-inputs-shared", "gemma4-keys-are-values-biases", "gemma4-with-experts", "qwen2-tied"),
    *("starcoder2-window", "granite-multipliers", "olmo2-grouped", "olmo3-window", "smollm3-every-fourth"),
    *("seed-oss-head-size", "glm4-half-rotated", "cohere2-window", "exaone4-window", "ernie4-5-tied"),
    *("arcee-yarn", "apertus-llama3", "hunyuan-alpha", "gptj-partial", "bloom-six-heads", "falcon-rw"),
    *("lfm2-adjusted-width", "bamba-grouped", "falcon-h1-multipliers", "llama4-chunks", "qwen2-moe-shared"),
    *("qwen3-moe-renormalised", "qwen3-next-grouped", "qwen3-5-grouped", "qwen3-5-moe-grouped"),
    *("granite-hybrid-experts", "granite-hybrid-dense-rope", "nemotron-h-experts-latent"),
    *("nemotron-h-without-experts", "lfm2-moe-dense-first", "olmoe-grouped", "flex-olmo-grouped"),
    *("deepseek-v2-groups-yarn-dense-first", "deepseek-v3-halves-no-query-rank", "mistral4-temperature"),
    *("glm4-moe-dense-first", "glm4-moe-lite-dense-last", "minimax-m2-half-rotated"),
    *("ernie4-5-moe-shared", "gpt-oss-yarn", "gpt-oss-mxfp4"),
    *("t5-gated", "mt5-newer", "umt5-untied", "bart-gelu", "mbart-scaled", "pegasus-relu"),
)
# Linear layers that cannot have adapters here: routers, gates of shared experts, and those whose weight
# attention reads itself.
_WITHOUT = (
    "router",
    "router.proj",
    "router.layer",
    "mlp.gate",
    "feed_forward.gate",
    "shared_expert_gate",
    "kv_b_proj",
)
_WITHOUT_OUT = ("falcon_h1", "nemotron_h")  # PEFT refuses `out_proj` of Mamba's layers in these
EIGHT = "llama3-rope-tied"  # with eight adapters of all linear layers, for one batch
_RANKS = (4, 8, 11, 16, 24, 32, 48, 64)


def drawn_adapters(base: str, model: Any) -> dict[str, dict[str, Any]]:
    """The adapters of a model of DRAWN, or of EIGHT."""
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not model.get_output_embeddings()
        and not name.endswith(_WITHOUT)
        and not (model.config.model_type in _WITHOUT_OUT and name.endswith("out_proj"))
    ]
    if base == EIGHT:
        return {f"rank-{rank}": {"r": rank, "lora_alpha": rank, "target_modules": linear} for rank in _RANKS}
    if model.config.is_encoder_decoder:
        root = {"r": 18, "lora_alpha": 6, "use_rslora": True, "target_modules": linear}
        return {"all": {"r": 5, "lora_alpha": 8, "target_modules": linear}, "root": root}
    names = {id(module): name for name, module in model.named_modules()}
    vocabulary = {names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]}
    adapters: dict[str, dict[str, Any]] = {
        "all": {"r": 5, "lora_alpha": 8, "target_modules": linear},
        "vocabulary": {"r": 18, "lora_alpha": 6, "use_rslora": True, "target_modules": sorted(vocabulary)},
    }
    experts = [name for name, one in model.named_parameters() if ".experts." in name and one.ndim == 3]
    if experts:
        adapters["experts"] = {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": [],
            "target_parameters": experts,
        }
    return adapters


def _prompts(directory: Path) -> list[np.ndarray]:
    if (path := directory / "encoder_golden.npz").exists():
        with np.load(path) as golden:
            starts = np.cumsum(golden["encoder_lengths"])[:-1]
            every = np.split(golden["encoder_tokens"], starts)
            return [every[row][:LONGEST] for row in golden["logits_rows"]]
    with np.load(directory / "golden.npz") as golden:
        starts = np.cumsum(golden["prompt_lengths"])[:-1]
        every = np.split(golden["prompt_tokens"], starts)
        return [every[row][:LONGEST] for row in golden["logits_rows"]]


def _logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*ids]]), use_cache=False).logits[0].double()


def _of_encoder(
    adapted: Any, merged: Any, prompts: Sequence[np.ndarray], *, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The results of a model with an encoder: `scores` are those of its own greedy tokens, 1 where forced."""
    forced = {0: config.get("forced_bos_token_id"), N_OUTPUT - 1: config.get("forced_eos_token_id")}
    scores, top_ids, top, outputs, gaps = [], [], [], [], []
    for prompt in prompts:
        tokens, near = np.array([config["decoder_start_token_id"]], np.int32), list[float]()
        for i in range(N_OUTPUT):
            two = torch.from_numpy(logits_of(merged, prompt, tokens)[-1]).topk(2)
            token = forced.get(i)
            chosen = int(two.indices[0]) if token is None else token
            near.append(float(two.values[0] - two.values[1]) if token is None else 1.0)
            tokens = np.append(tokens, np.int32(chosen))
        logprobs = torch.from_numpy(logits_of(adapted, prompt, tokens[:-1])).double().log_softmax(-1)
        one_each = logprobs[torch.arange(N_OUTPUT), torch.from_numpy(tokens[1:]).long()]
        for i, token in forced.items():
            one_each[i] = 1.0 if token is not None else one_each[i]
        scores.append(one_each)
        best = logprobs[1].topk(N_TOP)
        top_ids.append(best.indices)
        top.append(best.values)
        outputs.append(tokens[1:].tolist())
        gaps.append(near)
    return _arrays(scores, top_ids, top, outputs, gaps)


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
    return _arrays(scores, top_ids, top, outputs, gaps)


def _arrays(scores: Any, top_ids: Any, top: Any, outputs: Any, gaps: Any) -> dict[str, np.ndarray]:
    return {
        "scores": torch.cat(scores).numpy().astype(np.float32),
        "top_ids": torch.stack(top_ids).numpy().astype(np.int32),
        "top": torch.stack(top).numpy().astype(np.float32),
        "outputs": np.array(outputs, np.int32),
        "gaps": np.array(gaps, np.float32),
    }


def _model(base: str) -> Any:
    config = json.loads((GOLDEN / base / "config.json").read_text())
    attention = "sdpa" if config.get("alibi") else "eager"  # as in decoders.py
    is_encoder = config.get("is_encoder_decoder", False)
    more = {"quantization_config": Mxfp4Config(dequantize=True)} if "quantization_config" in config else {}
    model = (AutoModelForSeq2SeqLM if is_encoder else class_of(config["model_type"])).from_pretrained(
        GOLDEN / base,
        dtype=torch.float32,
        attn_implementation=attention,
        experts_implementation="eager",
        **more,
    )
    return model.eval()


def _saved(base: str, fields: Mapping[str, Any], place: Path, number: int | None) -> Any:
    """Save an adapter of random numbers at `place`, drawn from a seed or by the formula."""
    plain = _model(base)
    task = "SEQ_2_SEQ_LM" if plain.config.is_encoder_decoder else "CAUSAL_LM"
    adapted = peft.get_peft_model(plain, peft.LoraConfig(task_type=task, **fields)).eval()
    torch.manual_seed(SEED + (number or 0))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and number is None:
            values = drawn(name.replace(".default", ""), parameter.shape, fields["r"])
            parameter.data = torch.from_numpy(values)
        elif "lora_" in name:
            parameter.data = 0.3 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5
    adapted.save_pretrained(place)
    (place / "README.md").unlink(missing_ok=True)
    config = place / "adapter_config.json"
    values = json.loads(config.read_text()) | {"base_model_name_or_path": base}
    config.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    return adapted


def _shapes(place: Path, rank: int) -> dict[str, list[int]]:
    """Each tensor's name and shape; asserts that the file has the formula's numbers."""
    tensors = load_file(place / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_" in name:
            assert np.array_equal(tensor.numpy(), drawn(name, tensor.shape, rank)), name
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def make_files(only: Sequence[str]) -> None:
    """Write the files and print one line a model; with `only` those of other models stay as they are."""
    for base in (*BASES, *DRAWN, EIGHT):
        if only and base not in only:
            continue
        place, by_formula = DIRECTORY / base, base not in BASES
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        prompts = _prompts(GOLDEN / base)
        arrays = {
            "prompt_tokens": np.concatenate(prompts).astype(np.int32),
            "prompt_lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        }
        plain = _model(base)
        adapters = drawn_adapters(base, plain) if by_formula else BASES[base]
        results = _results
        if plain.config.is_encoder_decoder:
            config = json.loads((GOLDEN / base / "config.json").read_text())
            results = partial(_of_encoder, config=config)
        found = {"": results(plain, plain, prompts)}
        for number, (name, fields) in enumerate(adapters.items(), 1):
            with tempfile.TemporaryDirectory() as directory:
                saved = Path(directory) if by_formula else place / name
                adapted = _saved(base, fields, saved, None if by_formula else number)
                again = peft.PeftModel.from_pretrained(_model(base), saved).eval()
                merged = again if name == "vocabulary" else adapted.merge_and_unload()
                found[name] = results(again, merged, prompts)
                if by_formula:
                    config = json.loads((saved / "adapter_config.json").read_text())
                    kept = {key: value for key, value in config.items() if value or key == "r"}
                    arrays[f"{name}/saved"] = packed(kept, _shapes(saved, fields["r"]))
        assert len({str(one["outputs"]) for one in found.values()}) == len(found), (
            "adapters change the tokens"
        )
        arrays |= {f"{name}/{key}": value for name, one in found.items() for key, value in one.items()}
        np.savez_compressed(place / "golden.npz", **arrays)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        print(f"{base}: {len(adapters)} adapters, {size / 1e3:.0f} kB", flush=True)
    made = versions() | {"peft": peft.__version__}
    (DIRECTORY / "versions.json").write_text(json.dumps(made, indent=1) + "\n")
