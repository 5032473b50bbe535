"""Compares an engine's greedy tokens with model/reference.py, run over the whole text."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.model_config import ModelConfig
from orca_jax.model import reference
from orca_jax.request.request import Request
from tests.device.model.golden import MARGIN

# Where the last key that an indexer selects is not better than the next by this part of the greatest score,
# rounding may choose.
SELECTION_MARGIN = 1e-5


def _run(
    model: ModelConfig, parameters: Mapping[str, jax.Array], token_ids: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    scores: list[jax.Array] = []
    return reference.forward(model, parameters, token_ids, index_scores=scores), scores


_forward = jax.jit(_run, static_argnums=0)  # each model's program, whatever its parameters


class GreedyReference:
    """One model with its parameters."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, jax.Array]) -> None:
        self._model, self._parameters = model, dict(parameters)

    def sure(self, request: Request, margin: float = MARGIN) -> int:
        """The number of output tokens before the first unsure choice; fail unless all are the reference's.

        A choice is unsure if the two best logits are less than `margin` apart, or an indexer's choice of keys
        is unsure at its token or before.

        The model is causal, so one pass over the whole text, padded, gives every choice at once.
        """
        tokens = [*request.prompt_ids, *request.output_ids]
        padded = jnp.array(tokens + [0] * (self._model.n_positions - len(tokens)))
        found, scores = _forward(self._model, self._parameters, padded)
        logits, n_clear = np.asarray(found), self._n_clear([np.asarray(each) for each in scores])
        for i, token in enumerate(request.output_ids):
            at = len(request.prompt_ids) + i - 1
            row = logits[at]
            best, second = np.sort(row)[:-3:-1]
            if best - second < margin or at >= n_clear:
                return i
            assert token == row.argmax(), (request.request_id, i)
        return len(request.output_ids)

    def _n_clear(self, scores: list[np.ndarray]) -> int:
        """The number of tokens before the first for which any indexer's selection is unsure."""
        indexer, n_tokens = self._model.attention.indexer, self._model.n_positions
        if indexer is None or indexer.top_k >= n_tokens:
            return n_tokens
        unsure = np.zeros(n_tokens, bool)
        for each in scores:
            ordered = -np.sort(-each, axis=1)
            last, following = ordered[:, indexer.top_k - 1], ordered[:, indexer.top_k]
            greatest = np.abs(each, where=np.isfinite(each), out=np.zeros_like(each)).max(axis=1)
            near = np.isfinite(following) & (last < following + SELECTION_MARGIN * greatest)
            # Of keys that meet none of the index queries, the earlier is selected.
            unsure |= near & ~((last == 0) & (following == 0))
        return int(unsure.argmax()) if unsure.any() else n_tokens
