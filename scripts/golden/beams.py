"""Make the golden beam searches: the results of Hugging Face's generate() with several beams.

It reads the checkpoints of decoders.py. Each model of
NAMES gets a `beams.npz`, which tests/device/model/golden_beams.py describes. Random models never end a text
by themselves, so end-of-sequence tokens are chosen for each that some of its texts meet early.

A search is kept only where rounding changes nothing: in float64, and with noise of 1e-5 on the logits,
generate() must find the same tokens.
"""

# pyright: reportMissingImports=false

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from scripts.golden.with_torch import GOLDEN, SEED

NAMES = ("gpt2-tied-gelu-new", "llama-grouped", "qwen2-tied")  # of decoders
N_PROMPTS = 5
MAX_OUTPUT = 12
MAX_ENDS = 8
N_BEAMS = (2, 4)
LENGTH_PENALTIES = (0.6, 1.0, 2.0)
EARLY_STOPPING: tuple[bool | str, ...] = (False, True, "never")  # by number in the file
NOISE = 1e-5
DECODER_IDS: dict[str, int] = {}  # for a model with an encoder: the tokens that its texts begin and end with


class _Noise(LogitsProcessor):
    """Adds noise of the size of rounding errors to the logits."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + NOISE * torch.randn(scores.shape, generator=self._generator, dtype=scores.dtype)


def _search(
    model: Any,
    prompt: np.ndarray,
    encoder_ids: np.ndarray | None,
    eos: list[int],
    setting: tuple[int, float, bool | str],
    noise: int | None = None,
) -> tuple[list[list[int]], np.ndarray]:
    """The best sequences' tokens after the prompt, the end-of-sequence token among them, and their scores."""
    n_beams, length_penalty, early_stopping = setting
    model.generation_config = GenerationConfig(pad_token_id=0, **DECODER_IDS)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    if encoder_ids is None:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        own = torch.from_numpy(encoder_ids.astype(np.int64))[None]
        inputs = {"input_ids": own, "attention_mask": torch.ones_like(own), "decoder_input_ids": ids}
        inputs["use_cache"] = False  # T5's has as many layers as the encoder, not as the decoder
    found = model.generate(
        **inputs,
        max_new_tokens=MAX_OUTPUT,
        do_sample=False,
        num_beams=n_beams,
        num_return_sequences=n_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=eos or None,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=LogitsProcessorList([] if noise is None else [_Noise(noise)]),
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    ends = [[i for i, token in enumerate(row) if token in eos] for row in rows]
    rows = [row[: at[0] + 1] if at else row for row, at in zip(rows, ends, strict=True)]
    return rows, found.sequences_scores.numpy()


def _settled(
    model: Any, prompt: np.ndarray, encoder_ids: np.ndarray | None, eos: list[int]
) -> list[Any] | None:
    """The results of every setting; None where rounding could change one."""
    results: list[Any] = []
    for setting in itertools.product(N_BEAMS, LENGTH_PENALTIES, EARLY_STOPPING):
        rows, scores = _search(model, prompt, encoder_ids, eos, setting)
        for seed in (1, 2, 3):
            if _search(model, prompt, encoder_ids, eos, setting, seed)[0] != rows:
                return None
        model.double()
        exact, exact_scores = _search(model, prompt, encoder_ids, eos, setting)
        model.float()
        if exact != rows or np.abs(exact_scores - scores).max() > NOISE:
            return None
        results.append((rows, scores))
    return results


def choose_eos(
    model: Any, prompts: Sequence[np.ndarray], encoder_ids: Sequence[np.ndarray | None]
) -> list[int]:
    """Choose the most common tokens that do not come first, until half of the texts have one."""
    texts: list[list[int]] = []
    for prompt, own in zip(prompts, encoder_ids, strict=True):
        texts += _search(model, prompt, own, [], (4, 1.0, False))[0]
    chosen: list[int] = []
    left = texts
    while len(left) > len(texts) / 2 and len(chosen) < MAX_ENDS:
        middles = [token for text in left for token in set(text[2:-2]) - set(text[:2])]
        chosen.append(max(sorted(set(middles)), key=middles.count))
        left = [text for text in left if chosen[-1] not in text]
    return chosen


def write_beams(
    model: Any,
    directory: Path,
    prompts: Sequence[np.ndarray],
    encoder_ids: Sequence[np.ndarray | None],
    n_prompts: int = N_PROMPTS,
) -> str:
    """Write `beams.npz` with the first prompts that are settled; returns a line of statistics."""
    eos = choose_eos(model, prompts, encoder_ids)
    kept: list[tuple[np.ndarray, np.ndarray | None, list[Any]]] = []
    for prompt, own in zip(prompts, encoder_ids, strict=True):
        results = None if len(kept) == n_prompts else _settled(model, prompt, own, eos)
        if results is not None:
            kept.append((prompt, own, results))
    assert len(kept) == n_prompts, f"{len(kept)} prompts are settled"
    settings = list(itertools.product(N_BEAMS, LENGTH_PENALTIES, EARLY_STOPPING))
    tokens = np.full((len(settings), n_prompts, max(N_BEAMS), MAX_OUTPUT), -1, np.int32)
    scores = np.full((len(settings), n_prompts, max(N_BEAMS)), np.nan, np.float32)
    for i, (_, _, results) in enumerate(kept):
        for s, (rows, own_scores) in enumerate(results):
            for b, row in enumerate(rows):
                tokens[s, i, b, : len(row)] = row
                scores[s, i, b] = own_scores[b]
    arrays = {
        "eos_token_ids": np.array(eos, np.int32),
        "max_output": np.int32(MAX_OUTPUT),
        "n_beams": np.array([setting[0] for setting in settings], np.int32),
        "length_penalty": np.array([setting[1] for setting in settings], np.float32),
        "early_stopping": np.array([EARLY_STOPPING.index(setting[2]) for setting in settings], np.int32),
        "prompt_tokens": np.concatenate([prompt for prompt, _, _ in kept]),
        "prompt_lengths": np.array([len(prompt) for prompt, _, _ in kept], np.int32),
        "tokens": tokens,
        "scores": scores,
    }
    encoders = [own for _, own, _ in kept if own is not None]
    if encoders:
        arrays["encoder_tokens"] = np.concatenate(encoders)
        arrays["encoder_lengths"] = np.array([len(own) for own in encoders], np.int32)
    np.savez_compressed(directory / "beams.npz", **arrays)
    found = tokens[~np.isnan(scores)]
    ended = np.isin(found, eos).any(-1).mean()
    by_setting = len({tokens[s][~np.isnan(scores[s])].tobytes() for s in range(len(settings))})
    return (
        f"{directory.name:30} eos {eos}: {ended:.0%} of {len(found)} texts end by it, "
        f"{len(np.unique(found, axis=0))} distinct, {by_setting} of {len(settings)} settings distinct"
    )


def make_files(only: Sequence[str]) -> None:
    """Make the beam searches of NAMES."""
    for name in only or NAMES:
        directory = GOLDEN / name
        model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        ).eval()
        rng = np.random.default_rng([SEED, *name.encode(), 0])
        prompts = [
            rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in rng.integers(1, 20, 30)
        ]
        print(write_beams(model, directory, prompts, [None] * len(prompts)), flush=True)
