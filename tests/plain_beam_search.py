"""A plain beam search, with masks over whole vocabularies, with which the engine's is compared."""

from collections.abc import Callable, Sequence

import numpy as np

from orca_jax.request.beam_search import EarlyStopping

NEVER = -1e9


def plain_search(
    model: Callable[[Sequence[int]], np.ndarray],
    vocab_size: int,
    width: int,
    *,
    max_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    end_token_ids: frozenset[int],
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best outputs and their scores; `model` gives the log-probabilities of the token after one.

    As Hugging Face's `_beam_search` of one prompt: `width` running and `width` finished sequences, all in
    arrays. `vocab_size` is at least twice `width`.
    """
    running = [()] * width
    running_scores = np.array([0.0] + [NEVER] * (width - 1))
    sequences: list[tuple[int, ...]] = [()] * width
    scores, is_finished = np.full(width, NEVER), np.zeros(width, bool)
    keep = max(2, 1 + len(end_token_ids)) * width
    for length in range(1, max_tokens + 1):
        flat = np.concatenate(
            [model(one) + score for one, score in zip(running, running_scores, strict=True)]
        )
        top = np.argsort(-flat, kind="stable")[:keep]
        tokens = [int(i) % vocab_size for i in top]
        candidates = [(*running[int(i) // vocab_size], token) for i, token in zip(top, tokens, strict=True)]
        ends = np.array([token in end_token_ids or length == max_tokens for token in tokens])
        order = np.argsort(-(flat[top] + ends * NEVER), kind="stable")[:width]
        running = [candidates[i] for i in order]
        running_scores = (flat[top] + ends * NEVER)[order]
        just_finished = ends & (np.arange(keep)[: len(top)] < width)
        all_scores = np.concatenate([scores, flat[top] / length**length_penalty + ~just_finished * NEVER])
        best = np.argsort(-all_scores, kind="stable")[:width]
        scores = all_scores[best]
        sequences = [(sequences + candidates)[i] for i in best]
        is_finished = np.concatenate([is_finished, just_finished])[best]
        hope = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        worst = np.where(is_finished, scores.min(), NEVER)
        if not (running_scores[0] / hope**length_penalty > worst).any():
            break
        if (is_finished.all() and early_stopping is True) or ends.all():
            break
    return list(zip(sequences, scores.tolist(), strict=True))
