"""The sampler's functions against Hugging Face's logits processors (scripts/golden/processors.py).

The penalties that Hugging Face does not have are compared with OpenAI's formula.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.model.sampler import IN_PROMPT, adjust, allow, keep, sample
from tests.device.model.golden_processors import PROCESSORS, VOCABULARIES, GoldenRow, load_golden_rows

FAINT = 87.0  # a logit this far below the largest has no weight that a float32 holds
NEUTRAL: dict[str, Any] = {
    **{"bias": {}, "repetition": 1.0, "bad_words": (), "min_tokens": 0, "allowed_token_ids": ()},
    **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


@jax.jit
def chain(
    logits: jax.Array,
    seen: jax.Array,
    bias: jax.Array,
    repetition: jax.Array,
    words: jax.Array,
    temperature: jax.Array,
    cuts: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [R, V] after `adjust`, after `allow`, and the weights that temperature and `keep` leave."""
    zero = jnp.zeros(len(logits))
    adjusted = adjust(logits, seen, bias, repetition, zero, zero)
    allowed = allow(adjusted, words)
    scaled = (allowed - allowed.max(axis=-1, keepdims=True)) / temperature[:, None]
    return adjusted, allowed, keep(jnp.exp(scaled), *cuts)


def may_come(row: GoldenRow) -> np.ndarray:
    """The tokens [V] that the row's parameters allow, by naive rules."""
    ids = row.prompt + row.output
    allowed = np.full(len(row.logits), not row.allowed_token_ids)
    allowed[list(row.allowed_token_ids)] = True
    for *start, last in row.bad_words:
        if ids[len(ids) - len(start) :] == tuple(start):
            allowed[last] = False
    if len(row.output) < row.min_tokens:
        allowed[[*row.eos_ids, *row.stop_ids]] = False
    return allowed


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack [R, V] bool to the words [R, V / 32] int32 of `allow`; bits past V are set."""
    past = np.ones((len(allowed), -allowed.shape[1] % 32), bool)
    octets = np.packbits(np.concatenate([allowed, past], axis=1), axis=1, bitorder="little")
    return octets.view("<i4").astype(np.int32)


def seen_in(row: GoldenRow) -> np.ndarray:
    """`adjust`'s counts of the row's tokens, [V] int32."""
    seen = np.bincount(row.output, minlength=len(row.logits)).astype(np.int32)
    seen[list(set(row.prompt))] += IN_PROMPT
    return seen


def run(rows: Sequence[GoldenRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run `chain` on all rows in one call."""
    bias = np.zeros((len(rows), len(rows[0].logits)), np.float32)
    for i, row in enumerate(rows):
        bias[i, list(row.bias)] = list(row.bias.values())

    def each(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    adjusted, allowed, kept = chain(
        np.stack([row.logits for row in rows]),
        np.stack([seen_in(row) for row in rows]),
        bias,
        each("repetition"),
        packed(np.stack([may_come(row) for row in rows])),
        each("temperature"),
        (each("top_k", np.int32), each("top_p"), each("min_p")),
    )
    return np.asarray(adjusted), np.asarray(allowed), np.asarray(kept)


def differences(rows: Sequence[GoldenRow], golden: Sequence[GoldenRow]) -> list[tuple[int, str]]:
    """The differences between our functions on `rows`, in one batch, and Hugging Face on `golden`."""
    result: list[tuple[int, str]] = []
    for i, (row, adjusted, allowed, kept) in enumerate(zip(golden, *run(rows), strict=True)):
        left = np.isfinite(row.final)
        scaled = allowed / np.float32(rows[i].temperature)
        if not np.allclose(adjusted, row.adjusted, rtol=1e-5, atol=1e-6):
            result.append((i, "adjusted"))
        if not np.array_equal(np.isfinite(allowed), row.allowed):
            result.append((i, "allowed"))
        # A bias of 100 can leave less than a float32 of weight (e to the -87) for all the other tokens.
        weighty = scaled > scaled.max() - FAINT
        if not np.array_equal(kept > 0, left & weighty):
            result.append((i, "kept"))
        if not np.allclose(scaled[left], row.final[left], rtol=1e-5, atol=1e-6):
            result.append((i, "final"))
    return result


def alone(processor: str, vocab: int) -> list[GoldenRow]:
    return [row for row in load_golden_rows(vocab) if row.processors == (processor,)]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_processor_alone_equals_hugging_faces(processor: str) -> None:
    for vocab in VOCABULARIES:
        rows = alone(processor, vocab)
        assert len(rows) >= 3
        assert differences(rows, rows) == []


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_all_processors_in_one_batch_equal_hugging_faces(vocab: int) -> None:
    rows = load_golden_rows(vocab)
    assert sum(len(row.processors) > 3 for row in rows) >= 12
    assert differences(rows, rows) == []


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_comparison_finds_a_processor_that_is_left_out(processor: str) -> None:
    """Rows that use it alone differ, and so do some chains (not all, since min_tokens may be reached)."""
    for vocab in VOCABULARIES:
        rows = load_golden_rows(vocab)
        without = [replace(row, **{processor: NEUTRAL[processor]}) for row in rows]
        result = {i for i, _ in differences(without, rows)}
        asking = {i for i, row in enumerate(rows) if processor in row.processors}
        assert result <= asking
        assert len(result) > 0.3 * len(asking), (vocab, processor)
        assert any(rows[i].processors == (processor,) for i in result)
        assert any(len(rows[i].processors) > 1 for i in result)


def test_the_files_bad_words_end_prompts_and_outputs_in_every_way() -> None:
    """Bad words that apply: of one to three tokens, begun in the prompt, the output, or both."""
    met: set[tuple[int, str]] = set()
    missed: set[int] = set()
    for row in (row for vocab in VOCABULARIES for row in load_golden_rows(vocab)):
        ids = row.prompt + row.output
        for *start, _ in row.bad_words:
            if ids[len(ids) - len(start) :] != tuple(start):
                missed.add(len(start))
            elif len(start) <= len(row.output):
                met.add((len(start), "output"))
            else:
                met.add((len(start), "both" if row.output else "prompt"))
    assert met == {(0, "output"), (1, "output"), (1, "prompt"), (2, "output"), (2, "both"), (2, "prompt")}
    assert missed == {1, 2}


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_only_tokens_that_hugging_face_leaves_are_drawn(vocab: int) -> None:
    rows = load_golden_rows(vocab)
    _, allowed, _ = run(rows)
    names = ("temperature", "top_k", "top_p", "min_p")
    parameters = [jnp.array([getattr(row, name) for row in rows]) for name in names]
    n = 64
    keys = np.random.default_rng(vocab).integers(-(2**31), 2**31, (3, n, len(rows))).astype(np.int32)
    draw = jax.jit(jax.vmap(lambda *key: sample(jnp.asarray(allowed), *parameters, *key, cut=True)))
    drawn = np.asarray(draw(*keys))  # [64, R]
    for i, row in enumerate(rows):
        left = np.flatnonzero(np.isfinite(row.final))
        assert set(drawn[:, i].tolist()) <= set(left.tolist())


# Frequency and presence penalty.


def openai(logits: np.ndarray, counts: np.ndarray, frequency: float, presence: float) -> np.ndarray:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, as OpenAI's API reference has it."""
    return logits - counts * frequency - (counts > 0).astype(np.float64) * presence


def penalised(
    rows: Sequence[GoldenRow], repetition: np.ndarray, frequency: np.ndarray, presence: np.ndarray
) -> np.ndarray:
    """Penalised logits [R, V] of all rows in one call."""
    logits = np.stack([row.logits for row in rows])
    seen = np.stack([seen_in(row) for row in rows])
    bias = np.zeros_like(logits)
    for i, row in enumerate(rows):
        bias[i, list(row.bias)] = list(row.bias.values())
    return np.asarray(jax.jit(adjust)(logits, seen, bias, repetition, frequency, presence))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_frequency_and_presence_penalty_follow_openais_formula(vocab: int) -> None:
    """Positive and negative, each alone and both; they act last, on the golden file's adjusted logits."""
    rows = load_golden_rows(vocab)
    rng = np.random.default_rng(vocab)
    n = len(rows)
    repetition = np.array([row.repetition for row in rows], np.float32)
    frequency = (rng.uniform(-2, 2, n) * rng.integers(0, 2, n)).astype(np.float32)
    presence = (rng.uniform(-2, 2, n) * rng.integers(0, 2, n)).astype(np.float32)
    result = penalised(rows, repetition, frequency, presence)
    for i, row in enumerate(rows):
        counts = np.bincount(row.output, minlength=vocab)  # of the output alone
        expected = openai(row.adjusted.astype(np.float64), counts, float(frequency[i]), float(presence[i]))
        np.testing.assert_allclose(result[i], expected, rtol=1e-5, atol=2e-6)
        only_prompt = list(set(row.prompt) - set(row.output))
        np.testing.assert_allclose(result[i][only_prompt], row.adjusted[only_prompt], rtol=1e-5, atol=1e-6)
    several = [row for row in rows if row.output and np.bincount(row.output).max() > 1]
    assert len(several) > 5 and any(set(row.prompt) - set(row.output) for row in several)


def test_penalties_of_a_token_in_the_prompt_alone_in_the_output_alone_and_in_both() -> None:
    """Worked by hand: the prompt counts only for the repetition penalty."""
    logits = jnp.array([[3.0, 3.0, 3.0, 3.0, -3.0, -3.0, 0.0]] * 2)
    seen = jnp.array([[0, IN_PROMPT, 2, IN_PROMPT + 3, IN_PROMPT, 0, IN_PROMPT + 1]] * 2, jnp.int32)
    bias = jnp.zeros((2, 7)).at[1, 1].set(-5.0)
    repetition, frequency, presence = jnp.array([1.5, 2.0]), jnp.array([0.5, -0.25]), jnp.array([1.0, -2.0])
    expected = [
        [3.0, 2.0, 2.0 - 1.0 - 1.0, 2.0 - 1.5 - 1.0, -4.5, -3.0, 0.0 - 0.5 - 1.0],
        [3.0, -4.0, 1.5 + 0.5 + 2.0, 1.5 + 0.75 + 2.0, -6.0, -3.0, 0.0 + 0.25 + 2.0],
    ]
    np.testing.assert_allclose(adjust(logits, seen, bias, repetition, frequency, presence), expected)


def test_neutral_parameters_leave_the_logits_bit_for_bit() -> None:
    rows = [replace(row, **NEUTRAL) for row in load_golden_rows(333)]
    zero, one = np.zeros(len(rows), np.float32), np.ones(len(rows), np.float32)
    np.testing.assert_array_equal(penalised(rows, one, zero, zero), [row.logits for row in rows])
    adjusted, allowed, kept = run(rows)
    np.testing.assert_array_equal(adjusted, allowed)
    assert (kept > 0).all()
