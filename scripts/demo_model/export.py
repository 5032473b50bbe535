"""Exports the demo model for the package: a Hugging Face style directory with a card, and a test excerpt."""

from __future__ import annotations

import dataclasses
import json
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from scripts.demo_model.corpus import END_OF_TEXT, end_of_text, excerpt
from scripts.demo_model.network import EPSILON, Shape, held_out_loss, sample
from scripts.demo_model.training import Options, read_checkpoint


def config_of(shape: Shape, end: int) -> dict[str, object]:
    """`config.json`, as `transformers` reads it."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        **dataclasses.asdict(shape),
        "n_inner": None,
        "layer_norm_epsilon": EPSILON,
        "initializer_range": 0.02,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config_of(shape: Shape) -> dict[str, object]:
    """`tokenizer_config.json`, as `transformers` reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": shape.n_positions,
        "clean_up_tokenization_spaces": False,
    }


def legible(value: object) -> str:
    """Format a number for the model card: with thousands separators, or four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def command_of(run: dict[str, Any]) -> str:
    """The command that repeats a run, with its number of tokens."""
    options, defaults = run["options"], dataclasses.asdict(Options())
    words = ["python -m scripts.demo_model train", f"--tokens {run['n_tokens']}"]
    words += ["--resume"] if options["resume"] else []
    others = [
        f"--{name.replace('_', '-')} {options[name]}"
        for name, default in defaults.items()
        if name not in ("minutes", "tokens", "resume", "save_every") and options[name] != default
    ]
    return " ".join(words) + (" \\\n        " + " ".join(others) if others else "")


def row_of(number: int, run: dict[str, Any]) -> str:
    """A run's row in the model card's table."""
    options = run["options"]
    cells = (
        number,
        run["n_steps"],
        run["n_tokens"],
        round(run["minutes"]),
        "tokens" if options["tokens"] else "minutes",
        options["learning_rate"],
        options["adam_learning_rate"],
        options["decay_from"],
        options["long_from"],
    )
    return "| " + " | ".join(map(legible, cells)) + " |"


def export(work: Path, out: Path, held_out_file: Path) -> None:
    """Write the model directory (bfloat16 weights), its card, and the excerpt of held-out text."""
    trained, facts = read_checkpoint(work)
    weights = {name: value.astype(jnp.bfloat16) for name, value in trained.items()}
    shape = Shape(**facts["shape"])
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    params = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    held_out = (work / "held_out.txt").read_text(encoding="utf-8")
    part = excerpt(held_out)
    runs = facts["runs"]
    n_tokens_seen = sum(run["n_tokens"] for run in runs)
    of_part = held_out_loss(params, shape, tokenizer, part)
    of_all = held_out_loss(params, shape, tokenizer, held_out)
    values = {
        **facts["shape"],
        "n_params": facts["n_params"],
        "n_tokens_corpus": facts["n_tokens_corpus"],
        "n_tokens_seen": n_tokens_seen,
        "n_steps": sum(run["n_steps"] for run in runs),
        "n_runs": {1: "one run", 2: "two runs"}.get(len(runs), f"{len(runs)} runs"),
        "minutes": round(sum(run["minutes"] for run in runs)),
        **{f"part_{name}": value for name, value in dataclasses.asdict(of_part).items()},
        **{f"all_{name}": value for name, value in dataclasses.asdict(of_all).items()},
        "corpus_bytes": (work / "train.txt").stat().st_size,
        "epochs": n_tokens_seen / facts["n_tokens_corpus"],
        "n_documents": len(held_out.strip().split("\n\n")),
        "part_n_documents": len(part.strip().split("\n\n")),
        "unfinished": "" if facts["finished"] else "\n**This is a checkpoint of an unfinished run.**\n",
    }
    values = {name: legible(value) for name, value in values.items()}
    values["train_commands"] = "\n".join("    " + command_of(run) for run in runs)
    values["runs"] = "\n".join(row_of(number, run) for number, run in enumerate(runs, 1))
    for name, prompt, temperature in (
        ("greedy", "In the beginning", 0.0),
        ("drawn", "And it came to pass", 0.8),
        ("drawn_modern", "Jesus said to them,", 0.8),
    ):
        values[name] = "> " + sample(params, shape, tokenizer, prompt, 80, temperature).replace("\n", "\n> ")
    here = Path(__file__).parent
    card = (here / "card.md").read_text(encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo_model-") as temporary:
        new = Path(temporary)
        save_file(weights, new / "model.safetensors", {"format": "pt"})
        tokenizer.save(str(new / "tokenizer.json"))
        config = config_of(shape, end_of_text(tokenizer))
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer_config = json.dumps(tokenizer_config_of(shape), indent=2)
        (new / "tokenizer_config.json").write_text(tokenizer_config + "\n", encoding="utf-8")
        shutil.copyfile(here / "chat_template.jinja", new / "chat_template.jinja")
        (new / "README.md").write_text(string.Template(card).substitute(values), encoding="utf-8")
        for file in sorted(new.iterdir()):
            file.chmod(0o644)
            file.replace(out / file.name)
    held_out_file.parent.mkdir(parents=True, exist_ok=True)
    held_out_file.write_text(part, encoding="utf-8")
    print(f"{facts}\n{held_out_file.name}: {of_part}\nall held-out text: {of_all}")
    print("\n\n".join(values[name] for name in ("greedy", "drawn", "drawn_modern")))
