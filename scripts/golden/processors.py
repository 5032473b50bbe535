"""Make the golden file of the sampler: the results of Hugging Face's logits processors on random logits.

tests/device/model/golden_processors.py reads the
file and needs neither. Everything follows from the seed below; `versions` in the file has what made it.

Each row has its own logits, token ids of a prompt and an output, and parameters, and goes alone through
transformers' own processors in this order, without those whose parameter is neutral:

    SequenceBias (one token each)   RepetitionPenalty (prompt and output)         -> adjusted
    NoBadWords   MinNewTokensLength   PrefixConstrained                           -> allowed
    Temperature   TopK   TopP   MinP                                              -> final

Some rows have one processor, ROWS_ALONE of each kind, the rest several. A row whose result depends on
rounding is drawn again, so that the tokens that remain can be compared exactly.

The arrays for each vocabulary size V, R rows, with names that start with `V_` (`50_logits`). Ids and words
that are shorter than their array end in -1.

    logits          float32 [R, V]     multiples of 1/1024, no two of a row the same
    prompt_ids        int32 [R, 16]    at least one
    output_ids        int32 [R, 12]    may be none
    bias_ids          int32 [R, 8]     none: no bias
    bias_values     float32 [R, 8]     what is added to the logits of bias_ids
    repetition      float32 [R]        1: neutral
    bad_words         int32 [R, 8, 3]  up to eight words of up to three tokens
    min_tokens        int32 [R]        0: neutral
    eos_ids           int32 [2]        forbidden before min_tokens: these, the same for every row,
    stop_ids          int32 [R, 3]     and these
    allowed_token_ids int32 [R, A]     the only ones allowed; none: all are
    temperature     float32 [R]        1: neutral
    top_k             int32 [R]        0: neutral
    top_p           float32 [R]        1: neutral
    min_p           float32 [R]        0: neutral
    adjusted        float32 [R, V]     after bias and repetition penalty
    allowed           uint8 [R, V / 8] bit t % 8 of byte t // 8 is 1 if bad words, min_tokens and
                                       allowed_token_ids allow token t; other logits are unchanged
    final           float32 [R, V]     after all; -inf for a token that is not allowed
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf

from scripts.golden.with_torch import GOLDEN, SEED, versions

ROWS_ALONE = {50: 6, 333: 5, 1009: 3}  # vocabulary size: rows of each processor alone
ROWS_CHAINED = {50: 40, 333: 32, 1009: 24}
MOST_PROMPT, MOST_OUTPUT, MOST_BIASED, MOST_WORDS, MOST_STOPS = 16, 12, 8, 8, 3
EOS_IDS = (2, 7)
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Row:
    """One row's logits [V], ids and parameters; the defaults are neutral."""

    logits: np.ndarray
    prompt: list[int]
    output: list[int]
    stop_ids: list[int]
    bias: dict[int, float] = field(default_factory=dict[int, float])
    repetition: float = 1.0
    bad_words: list[list[int]] = field(default_factory=list[list[int]])
    min_tokens: int = 0
    allowed_token_ids: list[int] = field(default_factory=list[int])
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def _f32(value: float) -> float:
    """The nearest float32, so that the stored value is the one that was used."""
    return float(np.float32(value))


# How each parameter is drawn, from the generator and the row.


def _draw_bias(row: Row, rng: np.random.Generator) -> Row:
    ids = rng.choice(len(row.logits), rng.integers(1, MOST_BIASED + 1), replace=False)
    seen = np.array(row.prompt + row.output)
    ids[0] = rng.choice(seen)  # so that bias and repetition penalty act on one token
    far = rng.random(len(ids)) < 0.04
    values = np.where(far, rng.choice([-100.0, 100.0], len(ids)), rng.normal(0, 4, len(ids)))
    bias = {int(i): _f32(value) for i, value in zip(ids, values, strict=True)}
    return replace(row, bias=bias)


def _draw_repetition(row: Row, rng: np.random.Generator) -> Row:
    return replace(row, repetition=_f32(rng.choice([rng.uniform(0.3, 0.95), rng.uniform(1.05, 3.0)])))


def _draw_bad_words(row: Row, rng: np.random.Generator) -> Row:
    """Words of 1, 2 and 3 tokens whose start matches the end of prompt and output fully, partly or not."""
    ids = row.prompt + row.output

    def any_id() -> int:
        return int(rng.integers(8, len(row.logits)))  # no end of sequence

    place = int(rng.integers(len(ids)))
    words = [
        [any_id()],
        [any_id()],
        [ids[-1], any_id()],
        [ids[-1], any_id()],
        [any_id(), any_id()],
        [*ids[-2:], any_id()],
        [any_id(), ids[-1], any_id()],
        [*ids[place : place + 2], any_id()],
    ]
    picked = rng.permutation(len(words))[: rng.integers(1, MOST_WORDS + 1)]
    return replace(row, bad_words=[list(word) for word in dict.fromkeys(tuple(words[i]) for i in picked)])


def _draw_min_tokens(row: Row, rng: np.random.Generator) -> Row:
    return replace(row, min_tokens=max(1, len(row.output) + int(rng.integers(0, 4))))


def _draw_allowed(row: Row, rng: np.random.Generator) -> Row:
    vocab = len(row.logits)
    n = int(rng.choice([1, int(rng.integers(5, 20)), int(rng.integers(10, vocab))], p=[0.1, 0.4, 0.5]))
    return replace(row, allowed_token_ids=rng.choice(vocab, n, replace=False).tolist())


def _draw_temperature(row: Row, rng: np.random.Generator) -> Row:
    return replace(row, temperature=_f32(rng.choice([rng.uniform(0.2, 0.9), rng.uniform(1.1, 2.5)])))


def _draw_top_k(row: Row, rng: np.random.Generator) -> Row:
    few, many = int(rng.integers(2, 40)), int(rng.integers(40, len(row.logits) + 9))
    return replace(row, top_k=int(rng.choice([1, few, many], p=[0.1, 0.6, 0.3])))


def _draw_top_p(row: Row, rng: np.random.Generator) -> Row:
    share = rng.choice([0.01, rng.uniform(0.2, 0.8), rng.uniform(0.8, 0.99)], p=[0.1, 0.4, 0.5])
    return replace(row, top_p=_f32(share))


def _draw_min_p(row: Row, rng: np.random.Generator) -> Row:
    return replace(
        row, min_p=_f32(rng.choice([10 ** rng.uniform(-2, -0.5), rng.uniform(0.3, 1.0)], p=[0.8, 0.2]))
    )


DRAW: dict[str, Callable[[Row, np.random.Generator], Row]] = {
    "bias": _draw_bias,
    "repetition": _draw_repetition,
    "bad_words": _draw_bad_words,
    "min_tokens": _draw_min_tokens,
    "allowed": _draw_allowed,
    "temperature": _draw_temperature,
    "top_k": _draw_top_k,
    "top_p": _draw_top_p,
    "min_p": _draw_min_p,
}


def draw_row(vocab: int, names: list[str], rng: np.random.Generator) -> Row:
    """A row with the parameters of `names`, the others neutral."""
    grid = np.zeros(0, np.int64)
    while len(grid) < vocab:
        grid = np.unique(np.append(grid, (rng.normal(0, 2, vocab) * 1024).astype(np.int64)))
    logits = (rng.permutation(grid)[:vocab] / 1024).astype(np.float32)
    few = rng.choice(vocab, 12, replace=False)  # a small set of tokens, so that some repeat
    row = Row(
        logits=logits,
        prompt=rng.choice(few, rng.integers(1, MOST_PROMPT + 1)).tolist(),
        output=rng.choice(few, rng.choice([0, 1, int(rng.integers(2, MOST_OUTPUT + 1))])).tolist(),
        stop_ids=rng.choice(np.arange(8, vocab), rng.integers(0, MOST_STOPS + 1), replace=False).tolist(),
    )
    for name in names:
        row = DRAW[name](row, rng)
    return row


# Hugging Face's results for a row.


def processors_of(row: Row) -> tuple[list[Any], list[Any], list[Any]]:
    """The processors that make `adjusted`, `allowed` and `final`."""
    adjusting: list[Any] = []
    if row.bias:
        biases = {(token,): value for token, value in row.bias.items()}
        adjusting.append(hf.SequenceBiasLogitsProcessor(biases))
    if row.repetition != 1:
        adjusting.append(hf.RepetitionPenaltyLogitsProcessor(row.repetition))
    allowing: list[Any] = []
    if row.bad_words:
        allowing.append(hf.NoBadWordsLogitsProcessor(row.bad_words))
    if row.min_tokens:
        ends = [*EOS_IDS, *row.stop_ids]
        allowing.append(hf.MinNewTokensLengthLogitsProcessor(len(row.prompt), row.min_tokens, ends))
    if row.allowed_token_ids:
        allowing.append(hf.PrefixConstrainedLogitsProcessor(lambda _, __: row.allowed_token_ids, num_beams=1))
    cutting: list[Any] = []
    if row.temperature != 1:
        cutting.append(hf.TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        cutting.append(hf.TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        cutting.append(hf.TopPLogitsWarper(row.top_p))
    if row.min_p:
        cutting.append(hf.MinPLogitsWarper(row.min_p))
    return adjusting, allowing, cutting


def run(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores [V] after each of the three groups, in the precision of the row's logits."""
    ids = torch.tensor([row.prompt + row.output])
    scores = torch.from_numpy(row.logits.copy())[None]
    after: list[np.ndarray] = []
    for group in processors_of(row):
        for processor in group:
            scores = processor(ids, scores)
        after.append(scores[0].numpy().copy())
    adjusted, allowed, final = after
    return adjusted, allowed, final


def is_sure(row: Row, rng: np.random.Generator) -> bool:
    """Whether a token remains, and the same tokens remain under small errors in logits, top_p and min_p."""
    adjusted, allowed, final = run(row)
    left = np.isfinite(allowed)
    ids = row.allowed_token_ids
    # If nothing remains, Hugging Face gives allowed_token_ids precedence.
    if ids and not np.isfinite(run(replace(row, allowed_token_ids=[]))[1][ids]).any():
        return False
    assert left.any() and np.array_equal(allowed[left], adjusted[left])
    for sign in (-1, 0, 1):
        moved = row.logits.astype(np.float64)
        moved = moved * (1 + sign * rng.uniform(-1e-6, 1e-6, len(moved)))
        top_p = row.top_p if row.top_p == 1 else row.top_p + sign * 3e-6
        nearby = replace(row, logits=moved, top_p=top_p, min_p=min(row.min_p * (1 + sign * 1e-5), 1.0))
        exact = run(nearby)[2]
        if not np.array_equal(np.isfinite(exact), np.isfinite(final)):
            return False
        if sign == 0:
            kept = np.isfinite(final)
            np.testing.assert_allclose(final[kept], exact[kept], rtol=3e-6, atol=1e-6)
    return True


def rows_of(vocab: int, rng: np.random.Generator) -> list[Row]:
    """The rows of one vocabulary size, shuffled."""
    wanted = [[name] for name in DRAW for _ in range(ROWS_ALONE[vocab])]
    for _ in range(ROWS_CHAINED[vocab]):
        # Fewer rows have cuts, since a cut could hide the effect of the others.
        chance = [0.45 if name in ("top_k", "top_p", "min_p") else 0.7 for name in DRAW]
        wanted.append([name for name, p in zip(DRAW, chance, strict=True) if rng.random() < p] or list(DRAW))
    rows: list[Row] = []
    for names in wanted:
        row = draw_row(vocab, names, rng)
        while not is_sure(row, rng):
            row = draw_row(vocab, names, rng)
        rows.append(row)
    return [rows[i] for i in rng.permutation(len(rows))]


def padded(ids: list[list[int]], width: int) -> np.ndarray:
    """[R, width] int32, -1 past each list's end."""
    array = np.full((len(ids), width), -1, np.int32)
    for row, values in zip(array, ids, strict=True):
        row[: len(values)] = values
    return array


def arrays_of(rows: list[Row]) -> dict[str, np.ndarray]:
    """The arrays of one vocabulary size, as described at the top of this file."""
    after = [run(row) for row in rows]
    most_allowed = max(len(row.allowed_token_ids) for row in rows)
    bias_values = np.zeros((len(rows), MOST_BIASED), np.float32)
    bad_words = np.full((len(rows), MOST_WORDS, 3), -1, np.int32)
    for i, row in enumerate(rows):
        bias_values[i, : len(row.bias)] = list(row.bias.values())
        for j, word in enumerate(row.bad_words):
            bad_words[i, j, : len(word)] = word
    return {
        "logits": np.stack([row.logits for row in rows]),
        "prompt_ids": padded([row.prompt for row in rows], MOST_PROMPT),
        "output_ids": padded([row.output for row in rows], MOST_OUTPUT),
        "bias_ids": padded([list(row.bias) for row in rows], MOST_BIASED),
        "bias_values": bias_values,
        "repetition": np.array([row.repetition for row in rows], np.float32),
        "bad_words": bad_words,
        "min_tokens": np.array([row.min_tokens for row in rows], np.int32),
        "eos_ids": np.array(EOS_IDS, np.int32),
        "stop_ids": padded([row.stop_ids for row in rows], MOST_STOPS),
        "allowed_token_ids": padded([row.allowed_token_ids for row in rows], most_allowed),
        "temperature": np.array([row.temperature for row in rows], np.float32),
        "top_k": np.array([row.top_k for row in rows], np.int32),
        "top_p": np.array([row.top_p for row in rows], np.float32),
        "min_p": np.array([row.min_p for row in rows], np.float32),
        "adjusted": np.stack([adjusted for adjusted, _, _ in after]),
        "allowed": np.packbits([np.isfinite(allowed) for _, allowed, _ in after], axis=1, bitorder="little"),
        "final": np.stack([final for _, _, final in after]),
    }


def make_files(only: Sequence[str]) -> None:
    """Make the file and print how much of the vocabulary the rows leave."""
    output = GOLDEN / "processors.npz"
    arrays = {"versions": np.array(json.dumps(versions()))}
    for vocab in ROWS_ALONE:
        made = arrays_of(rows_of(vocab, np.random.default_rng([SEED, vocab])))
        arrays |= {f"{vocab}_{name}": array for name, array in made.items()}
        kept = np.isfinite(made["final"]).sum(axis=1)
        quarters = np.quantile(kept, [0, 0.25, 0.5, 0.75, 1]).astype(int).tolist()
        print(f"vocabulary {vocab}: {len(kept)} rows, tokens left: {quarters} (least, quarters, most)")
    np.savez_compressed(output, allow_pickle=False, **arrays)
    size = output.stat().st_size
    print(f"{size / 1e6:.2f} MB in {output}")
    assert size < MAX_BYTES, f"more than {MAX_BYTES} bytes"
