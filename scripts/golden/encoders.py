"""Make the golden files of encoder-decoder models: small random models, and Hugging Face's results on them.

As decoders.py, for the shapes of ENCODER_SHAPES in shapes.py.
Each model gets a directory with a checkpoint, `encoder_golden.npz`, which
tests/device/model/golden_encoders.py describes, and `beams.npz` of beams.py. A field of a shape
that begins with "_" says how the checkpoint is written.
"""

# pyright: reportMissingImports=false

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from scripts.golden import beams
from scripts.golden.beams import write_beams
from scripts.golden.shapes import ENCODER_SHAPES
from scripts.golden.with_torch import GOLDEN, MARGIN, SEED

MAX_OUTPUT = 16
N_INPUTS = 24
LONGEST_INPUT = 60
LOGIT_ROWS = 3  # the inputs whose logits at every position of a decoder's prefix are stored
PREFIX = 9
_EMBEDDED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def draw_weights(model: torch.nn.Module, rng: np.random.Generator, lacks_positions: bool) -> None:
    """Fill a model as in decoders.py: every weight, bias and norm is drawn, and text does not collapse."""
    scale = model.config.d_model if getattr(model.config, "scale_embedding", False) else 1.0
    model_type = model.config.model_type
    is_t5 = "t5" in model_type
    n_heads = model.config.num_attention_heads
    own_head = model.lm_head.weight is not model.get_input_embeddings().weight
    # T5 and umT5 multiply the logits of a tied head by d_model ** -0.5.
    scaled = getattr(model.config, "scale_decoder_outputs", False) or (model_type == "umt5" and not own_head)
    values_of = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, parameter in sorted(values_of.items()):
        shape = tuple(parameter.shape)
        values = rng.standard_normal(shape, dtype=np.float32)
        if "embed_positions" in name:
            if lacks_positions:
                continue  # sines and cosines
            values *= 0.7
        elif name == "lm_head.weight":
            values *= 0.35
        elif "shared" in name:
            values *= (1.0 if own_head else 0.35) / (1.0 if "bart" in model_type else np.sqrt(scale))
        elif "relative_attention_bias" in name:
            values *= 1.5
        elif "final_logits_bias" in name:
            values *= 0.5
        elif len(shape) == 2:
            if any(part in name for part in ("fc2", ".wo.")):
                values -= values.mean(axis=1, keepdims=True)
            values *= (2.5 if lacks_positions else 1.2 if model_type == "bart" else 1.5) / np.sqrt(shape[1])
            if is_t5 and any(part in name for part in ("Attention.q.", "Attention.k.")):
                values *= (shape[0] / n_heads) ** -0.25  # scores are not scaled
        elif "norm" in name:
            values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
            if scaled and name == "decoder.final_layer_norm.weight":
                values *= 5
            elif "pegasus" in model_type and name.startswith("model.decoder.layer_norm."):
                values *= np.sqrt(scale)
        else:
            values *= 0.1
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def build(name: str, shape: dict[str, Any]) -> Any:
    """The model with random weights. transformers 5 ties T5's heads; `_untied` adds a separate one."""
    sizes = {key: value for key, value in shape.items() if not key.startswith("_")}
    config = AutoConfig.for_model(**sizes)
    config._attn_implementation = "eager"
    model = AutoModelForSeq2SeqLM.from_config(config).eval().float()
    if shape.get("_untied"):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False  # umT5's forward pass reads it
    lacks_positions = "embed_positions.weight" in shape.get("_lacks", ())
    draw_weights(model, np.random.default_rng([SEED, *name.encode()]), lacks_positions)
    if "final_logits_bias" in shape.get("_lacks", ()):
        model.final_logits_bias.zero_()
    names = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    stated = {key: getattr(model.config, key, None) for key in names}
    stated |= shape | shape.get("_generation_config", {})
    beams.DECODER_IDS = {key: stated[key] for key in names if stated[key] is not None}
    model.generation_config = GenerationConfig(pad_token_id=0, **beams.DECODER_IDS)
    return model


def save(model: Any, shape: dict[str, Any], directory: Path) -> None:
    """Write config.json and safetensors, each in the spelling that the shape asks for."""
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    if shape.get("_older"):  # as transformers before 5 wrote it
        for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act"):
            config.pop(key, None)
        config["tie_word_embeddings"] = not shape.get("_untied")
    elif shape.get("_untied"):
        config["tie_word_embeddings"] = True  # as transformers 5 writes it
    config |= beams.DECODER_IDS
    config |= dict.fromkeys(shape.get("_generation_config", {})) | shape.get("_fields", {})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if "_generation_config" in shape:
        text = json.dumps(shape["_generation_config"], indent=2)
        (directory / "generation_config.json").write_text(text + "\n")
    left_out = tuple(shape.get("_lacks", ())) + (() if shape.get("_copies") else _EMBEDDED)
    tensors = {
        key.removeprefix(shape.get("_without_prefix", "")): value.clone()
        for key, value in model.state_dict().items()
        if not key.endswith(left_out) and (key != "lm_head.weight" or shape.get("_untied"))
    }
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def logits_of(model: Any, encoder_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[n, vocab_size] of a decoder's tokens."""
    with torch.no_grad():
        return (
            model(
                input_ids=torch.from_numpy(encoder_ids.astype(np.int64))[None],
                decoder_input_ids=torch.from_numpy(ids.astype(np.int64))[None],
                use_cache=False,
            )
            .logits[0]
            .numpy()
        )


def greedy(model: Any, encoder_ids: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """MAX_OUTPUT tokens, and the gaps of their logits; 1 for one that is forced."""
    forced = {0: "forced_bos_token_id", MAX_OUTPUT - 1: "forced_eos_token_id"}
    ids = np.array([start], np.int32)
    gaps: list[float] = []
    for i in range(MAX_OUTPUT):
        token = beams.DECODER_IDS.get(forced.get(i, ""))
        if token is not None:
            gaps.append(1.0)
            ids = np.append(ids, np.int32(token))
            continue
        last = logits_of(model, encoder_ids, ids)[-1]
        order = np.argsort(-last, kind="stable")
        gaps.append(float(last[order[0]] - last[order[1]]))
        ids = np.append(ids, np.int32(order[0]))
    return ids[1:], np.array(gaps, np.float32)


def check(model: Any, inputs: list[np.ndarray], outputs: np.ndarray, gaps: np.ndarray, start: int) -> float:
    """Compare the tokens with generate() and with float64; returns the largest error of a float32 logit."""
    worst = 0.0
    for own, output, gap in zip(inputs, outputs, gaps, strict=True):
        ids = torch.from_numpy(own.astype(np.int64))[None]
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            decoder_input_ids=torch.tensor([[start]]),
            max_new_tokens=MAX_OUTPUT,
            do_sample=False,
            use_cache=False,  # T5's has as many layers as the encoder, not as the decoder
        )[0, 1:].numpy()
        sure = np.cumprod(gap >= MARGIN).astype(bool)
        assert np.array_equal(generated[sure], output[sure]), "generate() says something else"
        tokens = np.concatenate([[start], output[:-1]])
        single = logits_of(model, own, tokens)
        model.double()
        worst = max(worst, float(np.abs(logits_of(model, own, tokens) - single).max()))
        model.float()
    assert worst < MARGIN / 2, f"rounding moves a logit by {worst}: the margin would not hold"
    return worst


def make(name: str, shape: dict[str, Any], directory: Path) -> str:
    """Write one model's directory; returns lines of statistics about its outputs."""
    model = build(name, shape)
    save(model, shape, directory)
    if shape.get("_loads", True):  # transformers computes the same with the written files
        loaded = AutoModelForSeq2SeqLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        ).eval()
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key
    rng = np.random.default_rng([SEED, *name.encode(), 1])
    n_inputs = rng.permutation(np.linspace(1, LONGEST_INPUT, N_INPUTS).round().astype(int))
    inputs = [rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in n_inputs]
    start = beams.DECODER_IDS["decoder_start_token_id"]
    results = [greedy(model, own, start) for own in inputs]
    outputs, gaps = (np.stack(each) for each in zip(*results, strict=True))
    worst = check(model, inputs, outputs, gaps, start)
    prefixes = rng.integers(0, model.config.vocab_size, (LOGIT_ROWS, PREFIX)).astype(np.int32)
    rows = np.array([int(np.argmin(n_inputs)), int(np.argmax(n_inputs)), 3], np.int32)[:LOGIT_ROWS]
    logits = np.stack([logits_of(model, inputs[i], own) for i, own in zip(rows, prefixes, strict=True)])
    np.savez_compressed(
        directory / "encoder_golden.npz",
        encoder_tokens=np.concatenate(inputs),
        encoder_lengths=np.array([len(own) for own in inputs], np.int32),
        outputs=outputs.astype(np.int32),
        gaps=gaps,
        logits_rows=rows,
        prefixes=prefixes,
        logits=logits.astype(np.float32),
    )
    beam_inputs = [
        rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in rng.integers(2, 40, 30)
    ]
    starts = [np.array([start], np.int32)] * len(beam_inputs)
    distinct = np.mean([len(set(row)) / len(row) for row in outputs.tolist()])
    return (
        f"{name:30} {distinct:.2f} of a row's tokens distinct, {len(np.unique(outputs, axis=0))} of "
        f"{len(outputs)} rows, {len(np.unique(outputs))} of {model.config.vocab_size} ids, logits' spread "
        f"{logits.std():.1f}, gap below {MARGIN:g}: {int((gaps < MARGIN).sum())}, rounding {worst:.1e}\n"
        + write_beams(model, directory, starts, beam_inputs, n_prompts=3)
    )


def make_files(only: Sequence[str]) -> None:
    """Make every model of ENCODER_SHAPES and print statistics."""
    for name, shape in ENCODER_SHAPES.items():
        if only and name not in only:
            continue
        directory = GOLDEN / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        print(make(name, shape, directory), flush=True)
