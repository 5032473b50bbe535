#!/usr/bin/env python3
"""Make the demo model that `orca_jax` ships: corpus, tokenizer, training, export.

A GPT-2 of about four million parameters, trained on two public-domain English Bibles, so that the engine can
be tried and tested with text that reads as prose and without a download. The text comes from Debian packages:

    apt-get install bible-kjv bible-kjv-text sword-text-web libsword-utils

The four commands share one working directory and run in this order:

    python scripts/make_demo_model.py corpus    --work build/demo
    python scripts/make_demo_model.py tokenizer --work build/demo
    python scripts/make_demo_model.py train     --work build/demo --minutes 75
    python scripts/make_demo_model.py export    --work build/demo

`train` may be given `--tokens` in place of `--minutes`. Either way the learning rate reaches zero at the end.
`export` may run at any time after the first checkpoint; it writes the Hugging Face style directory and the
excerpt of held-out text whose loss the model card states.

Text files of this script hold one document (a chapter) after another with a blank line between; a document's
first line is its heading, every further line a paragraph.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import html
import json
import math
import re
import shutil
import string
import subprocess
import tempfile
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 0
END_OF_TEXT = "<|endoftext|>"
EPSILON = 1e-5
HELD_OUT_SHARE = 0.02
EXCERPT_BYTES = 30_000

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the model; its parameter count is dominated by 12 * n_layer * n_embd**2."""

    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_positions: int = 512
    vocab_size: int = 2048


# --------------------------------------------------------------------------------------------- corpus

Chapter = tuple[str, int]  # (book, chapter number)
Verses = dict[Chapter, dict[int, str]]

DROPPED = re.compile(r"<(note|speaker)\b.*?</\1>|<title(?![^>]*canonical)[^>]*>.*?</title>", re.DOTALL)
BREAK = re.compile(r'<(?:div|lg)\b(?=[^>]*[se]ID=)(?![^>]*"x-milestone")[^>]*>|</?title[^>]*>')
QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\xa0": " "})


def command_output(*command: str) -> str:
    """The standard output of a command; says which packages to install if the command is missing."""
    if shutil.which(command[0]) is None:
        packages = "bible-kjv bible-kjv-text sword-text-web libsword-utils"
        raise SystemExit(f"{command[0]!r} not found; on Debian: apt-get install {packages}")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def verses_of_web() -> Verses:
    """The World English Bible, verse by verse, from OSIS markup; a newline stands for a paragraph break."""
    verses: Verses = collections.defaultdict(dict)
    for entry in command_output("mod2imp", "engWEB2015eb").split("$$$")[1:]:
        reference, _, markup = entry.partition("\n")
        match = re.fullmatch(r"(.+) (\d+):(\d+)", reference)
        if match is None or int(match[2]) == 0 or int(match[3]) == 0:
            continue  # prefaces and headings
        text = BREAK.sub("\n", DROPPED.sub(" ", markup.replace("\n", " ")))
        text = re.sub(r"<(l|lb|item)\b[^>]*>", " ", text)  # a line of verse or of a list runs on
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        text = re.sub(r"\s+([,.;:?!’”)])", r"\1", text)
        verses[match[1], int(match[2])][int(match[3])] = text.translate(QUOTES)
    return verses


def verses_of_kjv(books: list[str]) -> Verses:
    """The King James Version, verse by verse; `books` are the names of its 66 books in order."""
    verses: Verses = collections.defaultdict(dict)
    names: dict[str, str] = {}
    for line in command_output("bible", "-f", "gen1:1-rev22:21").splitlines():
        match = re.match(r"(\w*?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match is not None:
            book = names.setdefault(match[1], books[min(len(names), len(books) - 1)])
            verses[book, int(match[2])][int(match[3])] = match[4]
    if len(names) != len(books):
        raise SystemExit(f"expected {len(books)} books from `bible`, found {len(names)}")
    return verses


def heading(chapter: Chapter) -> str:
    """`I Samuel` 3 becomes `1 Samuel 3`, `Psalms` 3 becomes `Psalm 3`."""
    book = re.sub(r"^(I+V?) ", lambda m: {"I": "1", "II": "2", "III": "3", "IV": "4"}[m[1]] + " ", chapter[0])
    return f"{ {'Psalms': 'Psalm', 'Revelation of John': 'Revelation'}.get(book, book) } {chapter[1]}"


def document(chapter: Chapter, text: str) -> str:
    """Heading and paragraphs of one chapter, without blank lines and with single spaces."""
    paragraphs = (" ".join(line.split()).replace("— ", "—") for line in text.split("\n"))
    return "\n".join([heading(chapter), *filter(None, paragraphs)])


def with_paragraphs(verses: dict[int, str], model: dict[int, str]) -> str:
    """A chapter without paragraphs of its own, broken where `model`, the same chapter elsewhere, breaks."""
    text, ended = "", False
    for number, verse in verses.items():
        like = model.get(number, "")
        starts = "\n" in like[: len(like) - len(like.lstrip())]
        text += ("\n" if ended or starts else " ") + verse
        ended = "\n" in like[len(like.rstrip()) :]
    return text


def build_corpus(work: Path) -> None:
    """Write `train.txt` and `held_out.txt`; a held-out chapter is held out of both translations."""
    web = verses_of_web()
    order = list(dict.fromkeys(book for book, _ in web))
    first, last = order.index("Tobit"), order.index("Matthew")
    kjv = verses_of_kjv(order[:first] + order[last:])
    documents: dict[Chapter, list[str]] = collections.defaultdict(list)
    for chapter, verses in web.items():
        documents[chapter].append(document(chapter, " ".join(verses.values())))
    for chapter, verses in kjv.items():
        documents[chapter].append(document(chapter, with_paragraphs(verses, web.get(chapter, {}))))
    chapters = sorted(documents)
    np.random.default_rng(SEED).shuffle(chapters)
    chapters = [(str(book), int(number)) for book, number in chapters]
    n_held_out = round(HELD_OUT_SHARE * len(chapters))
    work.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", chapters[:n_held_out]), ("train", chapters[n_held_out:])):
        texts = [text for chapter in part for text in documents[chapter]]
        (work / f"{name}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        print(f"{name}: {len(part)} chapters, {len(texts)} documents, {sum(map(len, texts)):,} characters")


def excerpt(held_out: str) -> str:
    """The first whole documents of the held-out text that together fill about `EXCERPT_BYTES`."""
    texts, size = [], 0
    for text in held_out.strip().split("\n\n"):
        if size + len(text.encode()) <= EXCERPT_BYTES:
            texts.append(text)
            size += len(text.encode()) + 2
    return "\n\n".join(texts) + "\n"


# ------------------------------------------------------------------------------------------ tokenizer


def build_tokenizer(work: Path, shape: Shape) -> None:
    """Train the byte-level BPE on `train.txt` alone and write `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (work / "train.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    n_tokens = sum(map(len, encode(work, "train.txt")))
    n_bytes = len(text.encode())
    print(f"{tokenizer.get_vocab_size()} entries, {n_tokens:,} tokens, {n_bytes / n_tokens:.2f} bytes each")


def encode(work: Path, name: str) -> list[list[int]]:
    """The documents of a text file as token ids, each with the end-of-text token before and after it."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    return encode_text(tokenizer, (work / name).read_text(encoding="utf-8"))


def encode_text(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """As `encode`, for a text at hand."""
    end = end_of_text(tokenizer)
    encodings = tokenizer.encode_batch(text.strip().split("\n\n"))
    return [[end, *encoding.ids, end] for encoding in encodings]


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "every tokenizer made here has it"
    return end


# ---------------------------------------------------------------------------------------------- model


def initial_params(shape: Shape, key: jax.Array) -> Params:
    """GPT-2's initial parameters under their Hugging Face names; matrices are [in, out]."""
    width = shape.n_embd
    matrices = {
        "transformer.wte.weight": (shape.vocab_size, width, 0.02),
        "transformer.wpe.weight": (shape.n_positions, width, 0.01),
    }
    vectors = {"transformer.ln_f.weight": np.ones(width), "transformer.ln_f.bias": np.zeros(width)}
    for i in range(shape.n_layer):
        for name, n_in, n_out, depth in (
            ("attn.c_attn", width, 3 * width, 1),
            ("attn.c_proj", width, width, 2 * shape.n_layer),
            ("mlp.c_fc", width, 4 * width, 1),
            ("mlp.c_proj", 4 * width, width, 2 * shape.n_layer),
        ):
            matrices[f"transformer.h.{i}.{name}.weight"] = (n_in, n_out, 0.02 / math.sqrt(depth))
            vectors[f"transformer.h.{i}.{name}.bias"] = np.zeros(n_out)
        for name in ("ln_1", "ln_2"):
            vectors[f"transformer.h.{i}.{name}.weight"] = np.ones(width)
            vectors[f"transformer.h.{i}.{name}.bias"] = np.zeros(width)
    keys = jax.random.split(key, len(matrices))
    params = {
        name: scale * jax.random.normal(k, (rows, columns), jnp.float32)
        for k, (name, (rows, columns, scale)) in zip(keys, matrices.items(), strict=True)
    }
    return params | {name: jnp.asarray(value, jnp.float32) for name, value in vectors.items()}


def logits_of(params: Params, tokens: jax.Array, n_head: int) -> jax.Array:
    """Logits [B, S, V] float32 of `tokens` [B, S] that start at position 0; dense, no cache."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
        return centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ params[f"{name}.weight"] + params[f"{name}.bias"]

    batch, length = tokens.shape
    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][:length]  # [B, S, H]
    n_layer = sum(name.endswith("ln_1.weight") for name in params)
    for i in range(n_layer):
        layer = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, n_head, -1), 2, 0)  # [B, S, N, D]
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x += linear(attended, f"{layer}.attn.c_proj")
        x += linear(jax.nn.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")), f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ params["transformer.wte.weight"].T


@functools.partial(jax.jit, static_argnames="n_head")
def token_losses(params: Params, inputs: jax.Array, targets: jax.Array, n_head: int) -> jax.Array:
    """Cross-entropy [B, S] in nats of each target."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, inputs, n_head), targets)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss over a text file, measured as `held_out_loss` defines."""

    nats_per_token: float
    bits_per_byte: float
    n_tokens: int
    n_bytes: int


def held_out_loss(params: Params, shape: Shape, tokenizer: Tokenizer, text: str) -> Loss:
    """The mean loss over every token of every document and the end-of-text token that closes it.

    A document is what stands between blank lines. Its inputs are the end-of-text token and its own tokens;
    they are cut into windows of `n_positions` that neither overlap nor see each other. The bytes counted are
    those of the documents, plus one for each closing token.
    """
    rows, n_positions = [], shape.n_positions
    for ids in encode_text(tokenizer, text):
        for start in range(0, len(ids) - 1, n_positions):
            rows.append(ids[start : start + n_positions + 1])
    total = 0.0
    for start in range(0, len(rows), 8):
        inputs, targets = np.zeros((2, 8, n_positions), np.int32)
        mask = np.zeros((8, n_positions), np.float32)
        for j, row in enumerate(rows[start : start + 8]):
            n = len(row) - 1
            inputs[j, :n], targets[j, :n], mask[j, :n] = row[:-1], row[1:], 1.0
        total += float((token_losses(params, inputs, targets, shape.n_head) * mask).sum())
    n_tokens = sum(len(row) - 1 for row in rows)
    n_bytes = len(text.strip().replace("\n\n", "\n").encode()) + 1
    return Loss(total / n_tokens, total / math.log(2) / n_bytes, n_tokens, n_bytes)


# ------------------------------------------------------------------------------------------- training


class Stream:
    """Cuts the endless stream of documents into batches of windows."""

    def __init__(self, documents: list[list[int]], rng: np.random.Generator) -> None:
        self._documents, self._rng = documents, rng
        self._tokens = np.asarray(documents[0][:1], np.int32)

    def next(self, rows: int, length: int) -> np.ndarray:
        """The next batch [rows, length + 1]; its rows lie side by side in the stream, sharing a token."""
        n = rows * length
        while len(self._tokens) <= n:
            order = self._rng.permutation(len(self._documents))
            epoch = [np.asarray(self._documents[i][1:], np.int32) for i in order]
            self._tokens = np.concatenate([self._tokens, *epoch])
        window = np.stack([self._tokens[i : i + length + 1] for i in range(0, n, length)])
        self._tokens = self._tokens[n:]
        return window


def learning_rate_scale(step: int, progress: float, decay_from: float) -> float:
    """Warm-up over 25 iterations, then a plateau, then straight down to zero at progress 1."""
    return min((step + 1) / 25, 1.0) * min((1.0 - progress) / (1.0 - decay_from), 1.0)


def optimizer_of(kind: str, learning_rate: float, adam_learning_rate: float) -> optax.GradientTransformation:
    """Muon for the layers' matrices and Adam for the rest, or AdamW for all; gradients clipped to norm 1."""

    def is_matrix(name: str) -> bool:
        return re.search(r"\.c_\w+\.weight$", name) is not None

    def matrices(params: Params) -> dict[str, bool]:
        return {name: is_matrix(name) for name in params}

    def dimensions(params: Any) -> Any:  # optax's type of it has no room for its MuonDimensionNumbers
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


def train(work: Path, shape: Shape, options: argparse.Namespace) -> None:
    """Train, from scratch or with `resume` from the checkpoint's weights, in new random order.

    Prints a line per 20 iterations, and every few minutes saves a checkpoint and measures the held-out loss.
    """
    before = read_checkpoint(work) if options.resume else None
    runs: list[int] = before[1]["runs"] if before else []
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
    print(f"{n_params:,} parameters, {n_corpus:,} tokens in the corpus, {shape}, {vars(options)}", flush=True)

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
            facts = {
                "shape": dataclasses.asdict(shape),
                "n_params": n_params,
                "n_steps": step + (before[1]["n_steps"] if before else 0),
                "n_tokens_seen": seen + sum(runs),
                "runs": [*runs, seen],
                "n_tokens_corpus": n_corpus,
                "minutes": round((now - start) / 60 + (before[1]["minutes"] if before else 0), 1),
                "finished": progress >= 1.0,
                "options": {k: v for k, v in vars(options).items() if k not in ("work", "command")},
            }
            save_checkpoint(work, params, facts)
            print(f"held out: {measured}", flush=True)
            last_saved = time.monotonic()


def save_checkpoint(work: Path, params: Params, facts: dict[str, object]) -> None:
    """Write `checkpoint.safetensors` (float32) and the facts of the run, each replaced in one go."""
    temporary = work / "checkpoint.tmp"
    metadata = {"facts": json.dumps(facts)}
    save_file({name: np.asarray(value) for name, value in params.items()}, temporary, metadata)
    temporary.replace(work / "checkpoint.safetensors")


def read_checkpoint(work: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights (float32) and the facts that `save_checkpoint` wrote."""
    with safe_open(work / "checkpoint.safetensors", "numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return weights, json.loads(file.metadata()["facts"])


# --------------------------------------------------------------------------------------------- export


def sample(
    params: Params, shape: Shape, tokenizer: Tokenizer, prompt: str, n: int, temperature: float
) -> str:
    """The prompt and `n` more tokens: the likeliest ones at temperature 0, else drawn from a fixed seed."""
    ids = tokenizer.encode(prompt).ids
    rng = np.random.default_rng(SEED)
    window = np.zeros((1, len(ids) + n), np.int32)  # one shape: causal attention does not see what follows
    forward = jax.jit(functools.partial(logits_of, n_head=shape.n_head))
    while len(ids) < window.shape[1]:
        window[0, : len(ids)] = ids
        logits = np.asarray(forward(params, window)[0, len(ids) - 1], np.float64)
        if temperature > 0:
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        ids.append(int(logits.argmax()))
    return tokenizer.decode(ids)


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
    """A number as the model card shows it: thousands apart, or four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def export(work: Path, out: Path, held_out_file: Path) -> None:
    """Write the model directory (bfloat16 weights), its card, and the excerpt of held-out text."""
    trained, facts = read_checkpoint(work)
    weights = {name: value.astype(jnp.bfloat16) for name, value in trained.items()}
    shape = Shape(**facts["shape"])
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    params = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    held_out = (work / "held_out.txt").read_text(encoding="utf-8")
    part = excerpt(held_out)
    of_part = held_out_loss(params, shape, tokenizer, part)
    of_all = held_out_loss(params, shape, tokenizer, held_out)
    values = {
        **facts["options"],
        **facts["shape"],
        **facts,
        **{f"part_{name}": value for name, value in dataclasses.asdict(of_part).items()},
        **{f"all_{name}": value for name, value in dataclasses.asdict(of_all).items()},
        "corpus_bytes": (work / "train.txt").stat().st_size,
        "epochs": facts["n_tokens_seen"] / facts["n_tokens_corpus"],
        "n_documents": len(held_out.strip().split("\n\n")),
        "part_n_documents": len(part.strip().split("\n\n")),
        "unfinished": "" if facts["finished"] else "\n**This is a checkpoint of an unfinished run.**\n",
    }
    values = {name: legible(value) for name, value in values.items()}
    values["train_commands"] = "\n".join(
        f"    python scripts/make_demo_model.py train --tokens {n}{' --resume' if i else ''}"
        for i, n in enumerate(facts["runs"])
    )
    for name, prompt, temperature in (
        ("greedy", "In the beginning", 0.0),
        ("drawn", "And it came to pass", 0.8),
        ("drawn_modern", "Jesus said to them,", 0.8),
    ):
        values[name] = "> " + sample(params, shape, tokenizer, prompt, 80, temperature).replace("\n", "\n> ")
    card = (Path(__file__).parent / "demo_model_card.md").read_text(encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo_model-") as temporary:
        new = Path(temporary)
        save_file(weights, new / "model.safetensors", {"format": "pt"})
        tokenizer.save(str(new / "tokenizer.json"))
        config = config_of(shape, end_of_text(tokenizer))
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer_config = json.dumps(tokenizer_config_of(shape), indent=2)
        (new / "tokenizer_config.json").write_text(tokenizer_config + "\n", encoding="utf-8")
        (new / "README.md").write_text(string.Template(card).substitute(values), encoding="utf-8")
        for file in sorted(new.iterdir()):
            file.chmod(0o644)
            file.replace(out / file.name)
    held_out_file.parent.mkdir(parents=True, exist_ok=True)
    held_out_file.write_text(part, encoding="utf-8")
    print(f"{facts}\n{held_out_file.name}: {of_part}\nall held-out text: {of_all}")
    print("\n\n".join(values[name] for name in ("greedy", "drawn", "drawn_modern")))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = {name: commands.add_parser(name) for name in ("corpus", "tokenizer", "train", "export")}
    for each in command.values():
        each.add_argument("--work", type=Path, default=REPOSITORY / "build/demo", help="working directory")
    add = command["train"].add_argument
    add("--minutes", type=float, default=75.0, help="wall clock to train for")
    add("--tokens", type=int, help="tokens to train on, in place of --minutes")
    add("--resume", action="store_true", help="start from the checkpoint's weights, with a fresh optimizer")
    add("--batch-tokens", type=int, default=4096, help="tokens of one iteration")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--learning-rate", type=float, default=0.02, help="of Muon")
    add("--adam-learning-rate", type=float, default=0.003)
    add("--decay-from", type=float, default=0.4, help="share of the run at the full learning rate")
    add("--long-from", type=float, default=0.6, help="share of the run in windows of half the positions")
    add("--save-every", type=float, default=4.0, help="minutes between checkpoints")
    add = command["export"].add_argument
    add("--out", type=Path, default=REPOSITORY / "orca_jax/demo_model", help="the model's directory")
    add("--held-out", type=Path, default=REPOSITORY / "tests/data/held_out.txt", help="the excerpt's file")
    return parser.parse_args()


def main() -> None:
    """Run one command."""
    options = read_options()
    if options.command == "corpus":
        build_corpus(options.work)
    elif options.command == "tokenizer":
        build_tokenizer(options.work, Shape())
    elif options.command == "train":
        train(options.work, Shape(), options)
    else:
        export(options.work, options.out, options.held_out)


if __name__ == "__main__":
    main()
