"""Make the golden files of models like BERT, and of Qwen3's for embeddings and rankings.

They are small random models, and Hugging Face's final hidden states.

Each model gets a directory with a checkpoint and `embedding_golden.npz`, or `ranker_golden.npz` if it ranks
pairs of texts; tests/device/model/golden_embeddings.py describes them. All weights, norms and biases
are drawn, and states are compared with those of the same model in float64 before anything is written.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from scripts.golden.with_torch import GOLDEN, SEED, versions

N_PROMPTS = 16
ROUNDING = 2e-5  # a fifth of what the tests allow
_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 1,
}
_MODERN: dict[str, Any] = {
    **{"model_type": "modernbert", "max_position_embeddings": 90, "bos_token_id": 2, "eos_token_id": 3},
    **{"cls_token_id": 2, "sep_token_id": 3},
}
_QWEN3: dict[str, Any] = {
    **{"model_type": "qwen3", "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 16},
    **{"bos_token_id": 2, "eos_token_id": 3},
}
# "_masked": the checkpoint is of the model with the head of masked language modelling.
SHAPES: dict[str, dict[str, Any]] = {
    "bert-segments": {"model_type": "bert", "max_position_embeddings": 64, "type_vocab_size": 2},
    "bert-relu-masked": {
        **{"model_type": "bert", "max_position_embeddings": 33, "type_vocab_size": 1},
        **{"hidden_act": "relu", "layer_norm_eps": 1e-5, "_masked": True},
    },
    "roberta-padding": {
        **{"model_type": "roberta", "max_position_embeddings": 50, "type_vocab_size": 1, "pad_token_id": 5},
        **{"layer_norm_eps": 1e-5, "_masked": True},
    },
    "xlm-roberta-one-head": {
        **{"model_type": "xlm-roberta", "max_position_embeddings": 66, "type_vocab_size": 1},
        **{"num_attention_heads": 1, "hidden_act": "gelu_new"},
    },
    # The last layer has a window in the first two.
    "modernbert-windows": _MODERN
    | {"num_hidden_layers": 5, "local_attention": 8, "global_rope_theta": 5000.0, "local_rope_theta": 100.0},
    "modernbert-biases-masked": _MODERN
    | {
        **{"num_hidden_layers": 3, "local_attention": 5, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attention_bias": True, "mlp_bias": True, "norm_bias": True, "norm_eps": 1e-4},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "_masked": True,
    },
    "modernbert-one-head": _MODERN
    | {"num_attention_heads": 1, "num_hidden_layers": 4, "local_attention": 24, "hidden_activation": "silu"},
}
QWEN3_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "qwen3-embedding": _QWEN3 | {"tie_word_embeddings": False},
}
# By the logits of two tokens, "no" and "yes", or as classifiers of one or two labels.
QWEN3_RANKERS: dict[str, dict[str, Any]] = {
    "qwen3-ranker-tokens": _QWEN3 | {"tie_word_embeddings": False},
    "qwen3-ranker-tied": _QWEN3 | {"tie_word_embeddings": True},
    "qwen3-ranker-label": _QWEN3 | {"num_labels": 1},
    "qwen3-ranker-labels": _QWEN3 | {"num_labels": 2},
}
NO, YES = 100, 7  # of different devices, where two share the vocabulary

RANKERS: dict[str, dict[str, Any]] = {
    "bert-ranker": {"model_type": "bert", "max_position_embeddings": 64, "type_vocab_size": 2},
    "xlm-roberta-ranker": {"model_type": "xlm-roberta", "max_position_embeddings": 66, "type_vocab_size": 1},
    "modernbert-ranker-first": _MODERN
    | {"local_attention": 8, "classifier_pooling": "cls", "classifier_activation": "silu"},
    # Pairs of more tokens than a part of pooled rows has.
    "modernbert-ranker-mean": _MODERN
    | {
        **{"max_position_embeddings": 300, "local_attention": 16, "classifier_pooling": "mean"},
        **{"classifier_bias": True, "norm_bias": True, "_longest": 148},
    },
}
BEGIN, SEPARATOR, FIRST_WORD = 2, 3, 5  # ids below the last are special


def _draw(model: torch.nn.Module, rng: np.random.Generator) -> None:
    for name, parameter in sorted(model.named_parameters()):
        values = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
        if "norm" in name.lower():
            values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif values.ndim == 2 and "embeddings" not in name:
            values *= 1.5 / np.sqrt(values.shape[1])
        elif values.ndim == 1:
            values *= 0.1
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def _states(model: Any, prompt: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].double().numpy()


def _save(name: str, kind: Any, fields: dict[str, Any]) -> tuple[Any, np.random.Generator]:
    """Draw a model of these fields, and save it in its directory."""
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    whole = kind.from_config(config).eval().float()
    rng = np.random.default_rng([SEED, *name.encode()])
    _draw(whole, rng)
    shutil.rmtree(GOLDEN / name, ignore_errors=True)
    whole.save_pretrained(GOLDEN / name)
    return whole, rng


def _make_ranker(name: str, shape: dict[str, Any]) -> None:
    """A ranker of pairs, and its results before the sigmoid."""
    shape = dict(shape)
    longest = shape.pop("_longest", 28)
    model, rng = _save(name, AutoModelForSequenceClassification, _SIZES | shape | {"num_labels": 1})
    pairs: list[list[np.ndarray]] = [
        [rng.integers(FIRST_WORD, _SIZES["vocab_size"], n) for n in rng.integers(1, longest + 1, 2)]
        for _ in range(N_PROMPTS)
    ]
    results: list[float] = []
    for first, second in pairs:
        ids = [BEGIN, *first, SEPARATOR, *second, SEPARATOR]
        given = {"input_ids": torch.tensor([ids])}
        if "type_vocab_size" in shape:
            segments = [0] * (len(first) + 2) + [shape["type_vocab_size"] - 1] * (len(second) + 1)
            given["token_type_ids"] = torch.tensor([segments])
        with torch.no_grad():
            results.append(
                float(model(**given, attention_mask=torch.ones_like(given["input_ids"])).logits[0, 0])
            )
    np.savez_compressed(
        GOLDEN / name / "ranker_golden.npz",
        tokens=np.concatenate([text for pair in pairs for text in pair]).astype(np.int32),
        lengths=np.array([[len(text) for text in pair] for pair in pairs], np.int32),
        results=np.array(results, np.float32),
        versions=np.array(json.dumps(versions())),
    )
    print(f"{name:24} {len(pairs)} pairs, results {min(results):.2f} to {max(results):.2f}", flush=True)


def _make_qwen3_ranker(name: str, shape: dict[str, Any]) -> None:
    """A ranker of prompts, its results, and its scores: of two results the softmax's second part."""
    classifies = "num_labels" in shape
    kind = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    answers = {} if classifies else {"is_original_qwen3_reranker": True, "classifier_from_token": [NO, YES]}
    model, rng = _save(name, kind, _SIZES | shape | answers)
    pairs: list[list[np.ndarray]] = [
        [rng.integers(FIRST_WORD, _SIZES["vocab_size"], n) for n in rng.integers(1, 29, 2)]
        for _ in range(N_PROMPTS)
    ]
    results: list[np.ndarray] = []
    for first, second in pairs:
        ids = torch.tensor([[*first, *second]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        results.append((logits[0] if classifies else logits[0, -1, [NO, YES]]).double().numpy())
    found = torch.from_numpy(np.stack(results))
    scores = torch.softmax(found, 1)[:, 1] if found.shape[1] > 1 else torch.sigmoid(found[:, 0])
    np.savez_compressed(
        GOLDEN / name / "qwen3_ranker_golden.npz",
        tokens=np.concatenate([text for pair in pairs for text in pair]).astype(np.int32),
        lengths=np.array([[len(text) for text in pair] for pair in pairs], np.int32),
        results=found.numpy().astype(np.float32),
        scores=scores.numpy(),
        versions=np.array(json.dumps(versions())),
    )
    print(f"{name:24} {len(pairs)} pairs, scores {scores.min():.3f} to {scores.max():.3f}", flush=True)


def _describe_pooling(name: str) -> None:
    """Write the files of Sentence Transformers that Qwen3-Embedding has."""
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules.items())
    ]
    (GOLDEN / name / "modules.json").write_text(json.dumps(listed, indent=2))
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
    pooling = {"word_embedding_dimension": _SIZES["hidden_size"], "include_prompt": True}
    pooling |= {f"pooling_mode_{mode}": False for mode in modes} | {"pooling_mode_lasttoken": True}
    (GOLDEN / name / "1_Pooling").mkdir()
    (GOLDEN / name / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))


def make_files(only: Sequence[str]) -> None:
    """Write the directories, all or those in `only`, and print a line for each."""
    for name, shape in (SHAPES | QWEN3_EMBEDDINGS).items():
        if only and name not in only:
            continue
        fields = _SIZES | {key: value for key, value in shape.items() if not key.startswith("_")}
        whole, rng = _save(name, AutoModelForMaskedLM if shape.get("_masked") else AutoModel, fields)
        model = whole.base_model if shape.get("_masked") else whole
        # Padding ids would move RoBERTa's positions.
        allowed = np.setdiff1d(np.arange(fields["vocab_size"]), [fields["pad_token_id"]])
        first = fields["pad_token_id"] + 1 if "roberta" in fields["model_type"] else 0
        if name in QWEN3_EMBEDDINGS:
            _describe_pooling(name)
            first = 1  # a decoder keeps a position for a token that it samples
        longest = fields["max_position_embeddings"] - first
        lengths = [1, longest, *rng.integers(2, longest, N_PROMPTS - 2).tolist()]
        prompts = [rng.choice(allowed, n).astype(np.int32) for n in lengths]
        states = [_states(model, prompt) for prompt in prompts]
        model.double()
        exact = [_states(model, prompt) for prompt in prompts]
        worst = max(float(np.abs(a - b).max()) for a, b in zip(states, exact, strict=True))
        assert worst < ROUNDING, f"{name}: rounding moves a hidden state by {worst}"
        np.savez_compressed(
            GOLDEN / name / "embedding_golden.npz",
            prompt_tokens=np.concatenate(prompts),
            prompt_lengths=np.array(lengths, np.int32),
            cls=np.stack([each[0] for each in states]).astype(np.float32),
            last=np.stack([each[-1] for each in states]).astype(np.float32),
            mean=np.stack([each.mean(axis=0) for each in states]).astype(np.float32),
            versions=np.array(json.dumps(versions())),
        )
        print(f"{name:24} {len(prompts)} prompts of 1 to {longest} tokens, rounding {worst:.1e}", flush=True)
    for name, shape in RANKERS.items():
        if not only or name in only:
            _make_ranker(name, shape)
    for name, shape in QWEN3_RANKERS.items():
        if not only or name in only:
            _make_qwen3_ranker(name, shape)
