"""Compares an engine's greedy tokens with model/reference.py, run over the whole text."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.families.model_config import ModelConfig
from orca_jax.model import reference
from orca_jax.request.request import Request
from tests.device.model.golden import MARGIN

_forward = jax.jit(reference.forward, static_argnums=0)  # each model's program, whatever its parameters


class GreedyReference:
    """One model with its parameters."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, jax.Array]) -> None:
        self._model, self._parameters = model, dict(parameters)

    def sure(self, request: Request, margin: float = MARGIN) -> int:
        """The number of output tokens before the first unsure choice; fail unless all are the reference's.

        A choice is unsure if the two best logits are less than `margin` apart.

        The model is causal, so one pass over the whole text, padded, gives every choice at once.
        """
        tokens = [*request.prompt_ids, *request.output_ids]
        padded = jnp.array(tokens + [0] * (self._model.n_positions - len(tokens)))
        logits = np.asarray(_forward(self._model, self._parameters, padded))
        for i, token in enumerate(request.output_ids):
            row = logits[len(request.prompt_ids) + i - 1]
            best, second = np.sort(row)[:-3:-1]
            if best - second < margin:
                return i
            assert token == row.argmax(), (request.request_id, i)
        return len(request.output_ids)
