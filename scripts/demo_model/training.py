"""Trains the demo model: batches, optimizer, schedule, and the checkpoint with the facts of its runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from scripts.demo_model.corpus import SEED, encode, excerpt
from scripts.demo_model.network import Params, Shape, held_out_loss, initial_params, token_losses


@dataclasses.dataclass(frozen=True)
class Options:
    """Training options: a run lasts `tokens` tokens, or `minutes` if that is None; shares are of the run."""

    minutes: float = 75.0
    tokens: int | None = None
    resume: bool = False
    batch_tokens: int = 4096
    optimizer: str = "muon"
    learning_rate: float = 0.02  # of Muon
    adam_learning_rate: float = 0.003
    decay_from: float = 0.4
    long_from: float = 0.6
    save_every: float = 4.0  # minutes


class Stream:
    """Cuts the endless stream of documents into batches of windows."""

    def __init__(self, documents: list[list[int]], rng: np.random.Generator) -> None:
        self._documents, self._rng = documents, rng
        self._tokens = np.asarray(documents[0][:1], np.int32)

    def next(self, rows: int, length: int) -> np.ndarray:
        """The next batch [rows, length + 1]; its rows are consecutive in the stream, sharing a token."""
        n = rows * length
        while len(self._tokens) <= n:
            order = self._rng.permutation(len(self._documents))
            epoch = [np.asarray(self._documents[i][1:], np.int32) for i in order]
            self._tokens = np.concatenate([self._tokens, *epoch])
        window = np.stack([self._tokens[i : i + length + 1] for i in range(0, n, length)])
        self._tokens = self._tokens[n:]
        return window


def learning_rate_scale(step: int, progress: float, decay_from: float) -> float:
    """Warm-up over 25 iterations, then a plateau, then linear decay to zero at progress 1."""
    return min((step + 1) / 25, 1.0) * min((1.0 - progress) / (1.0 - decay_from), 1.0)


def optimizer_of(kind: str, learning_rate: float, adam_learning_rate: float) -> optax.GradientTransformation:
    """Muon for the layers' matrices and Adam for the rest, or AdamW for all; gradients clipped to norm 1."""

    def is_matrix(name: str) -> bool:
        return re.search(r"\.c_\w+\.weight$", name) is not None

    def matrices(params: Params) -> dict[str, bool]:
        return {name: is_matrix(name) for name in params}

    def dimensions(params: Any) -> Any:  # optax's type for it does not allow MuonDimensionNumbers
        return {name: MuonDimensionNumbers(0, 1) if is_matrix(name) else None for name in params}

    if kind == "adamw":
        rule = optax.adamw(adam_learning_rate, b2=0.95, weight_decay=0.1, mask=matrices)
    else:
        rule = muon(
            learning_rate,
            ns_steps=4,  # enough with this preconditioning: singular values near 0.7 to 1.1
            preconditioning="aol",
            weight_decay=0.1,
            adam_b2=0.95,
            adam_learning_rate=adam_learning_rate,
            muon_weight_dimension_numbers=dimensions,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def train(work: Path, shape: Shape, options: Options) -> None:
    """Train from scratch, or with `resume` from the checkpoint's weights, in a new random order.

    Prints a line per 20 iterations, and every few minutes saves a checkpoint and measures the held-out loss.
    """
    before = read_checkpoint(work) if options.resume else None
    runs: list[dict[str, Any]] = before[1]["runs"] if before else []
    rng = np.random.default_rng(SEED + len(runs))
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    held_out = excerpt((work / "held_out.txt").read_text(encoding="utf-8"))
    documents = encode(work, "train.txt")
    n_corpus = sum(len(ids) - 1 for ids in documents)
    stream = Stream(documents, rng)
    params = jax.tree.map(jnp.asarray, before[0]) if before else initial_params(shape, jax.random.key(SEED))
    optimizer = optimizer_of(options.optimizer, options.learning_rate, options.adam_learning_rate)
    state = optimizer.init(params)
    n_params = sum(value.size for value in params.values())
    print(f"{n_params:,} parameters, {n_corpus:,} tokens in the corpus, {shape}, {options}", flush=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def iterate(
        params: Params, state: optax.OptState, window: jax.Array, scale: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        def mean_loss(params: Params) -> jax.Array:
            return token_losses(params, window[:, :-1], window[:, 1:], shape.n_head).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, loss

    start = time.monotonic()
    seen, step, progress, losses = 0, 0, 0.0, []
    last_line, last_saved = (start, 0), start
    while progress < 1.0:
        long = progress >= options.long_from
        length = shape.n_positions if long else shape.n_positions // 2
        scale = learning_rate_scale(step, progress, options.decay_from)
        window = stream.next(options.batch_tokens // length, length)
        params, state, loss = iterate(params, state, window, jnp.float32(scale))
        losses.append(float(loss))
        seen, step, now = seen + window[:, 1:].size, step + 1, time.monotonic()
        progress = seen / options.tokens if options.tokens else (now - start) / (60 * options.minutes)
        if step % 20 == 0 or progress >= 1.0:
            rate = (seen - last_line[1]) / (now - last_line[0])
            print(
                f"step {step} minutes {(now - start) / 60:.1f} tokens {seen:,} epochs {seen / n_corpus:.2f} "
                f"length {length} scale {scale:.3f} loss {np.mean(losses):.4f} tokens/s {rate:,.0f}",
                flush=True,
            )
            last_line, losses = (now, seen), []
        if now - last_saved > 60 * options.save_every or progress >= 1.0:
            measured = held_out_loss(params, shape, tokenizer, held_out)
            run = {
                "n_steps": step,
                "n_tokens": seen,
                "minutes": round((now - start) / 60, 1),
                "options": dataclasses.asdict(options),
            }
            facts = {
                "shape": dataclasses.asdict(shape),
                "n_params": n_params,
                "n_tokens_corpus": n_corpus,
                "finished": progress >= 1.0,
                "runs": [*runs, run],
            }
            save_checkpoint(work, params, facts)
            print(f"held out: {measured}", flush=True)
            last_saved = time.monotonic()


def save_checkpoint(work: Path, params: Params, facts: dict[str, object]) -> None:
    """Write `checkpoint.safetensors` (float32) and the facts of its runs, atomically."""
    temporary = work / "checkpoint.tmp"
    metadata = {"facts": json.dumps(facts)}
    save_file({name: np.asarray(value) for name, value in params.items()}, temporary, metadata)
    temporary.replace(work / "checkpoint.safetensors")


def read_checkpoint(work: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights (float32) and the facts that `save_checkpoint` wrote."""
    with safe_open(work / "checkpoint.safetensors", "numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights, json.loads(file.metadata()["facts"])
