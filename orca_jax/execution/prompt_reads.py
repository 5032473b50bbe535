"""Results for prompt tokens: log-probabilities, embeddings, and the experts that every token chose.

The last layer of a forward pass runs each row's last token alone. If a row asks for results of its other
tokens, they pass through the last layer afterwards, in parts (iteration/rows/scored.py, pooled.py), with the
cache that the forward pass wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.execution.programs import Program, ToCompile
from orca_jax.execution.routed import DeviceRouted, RoutedAgain
from orca_jax.execution.sampling import PromptReads
from orca_jax.execution.stage import Stage
from orca_jax.iteration.flat_batch import BatchSizes, FlatBatch, FlatLayout
from orca_jax.iteration.message import POOLED, ROUTED, ControlMessage
from orca_jax.iteration.rows.pooled import pooled_layout, pooled_parts
from orca_jax.iteration.rows.scored import SCORED, scored_layout, scored_parts
from orca_jax.iteration.shape import EngineShape
from orca_jax.model.kv_cache import LayerMemory


class PromptReader:
    """Starts the last stage's programs that read prompts."""

    def __init__(
        self, stage: Stage, shape: EngineShape, place: jax.sharding.Sharding, state_size: int
    ) -> None:
        self._stage, self._shape, self._place = stage, shape, place
        self._no_states = jax.device_put(np.zeros(state_size, np.float32), place)

    def read(
        self,
        hidden: jax.Array,
        cache: LayerMemory,
        message: ControlMessage,
        routed: Sequence[DeviceRouted] = (),
    ) -> PromptReads | None:
        """Start what rows ask for; None if they ask for nothing.

        `hidden` [T, H] is what entered the last layer, or with a recurrent one the sum after its mixer, and
        `cache` is that layer's. The next iteration must not have begun.
        """
        scores: dict[int, list[tuple[jax.Array, int]]] = {
            place: [] for place in np.flatnonzero(message.sampling["prompt_logprobs"] >= 0).tolist()
        }
        pools = bool((message.sampling["flags"] & POOLED).any())
        if not (scores or pools or routed):
            return None
        if scores:
            for place, at, flat in scored_parts(message, self._shape.max_blocks):
                part = self._past_last_layer(self._stage.score, hidden, cache, at, flat)
                scores[place].append((part, flat.n_tokens))
        pooled: list[tuple[jax.Array, list[int]]] = []
        if pools:
            parts = pooled_parts(message, message.n_pooled, self._shape, causal=self._stage.causal)
            last, before = -1, self._no_states
            for places, at, flat in parts:
                before = before if places[0] == last else self._no_states
                part, before = self._past_last_layer(self._stage.pool, hidden, cache, at, flat, before)
                pooled.append((part, places))
                last = places[-1]
        return PromptReads(scores, pooled, routed)

    def route_again(
        self, hidden: jax.Array, cache: LayerMemory, message: ControlMessage
    ) -> list[RoutedAgain]:
        """Start the last layer's routing for rows that ask for it and have more than one token."""
        wants = (message.sampling["flags"] & ROUTED > 0) & (message.input_length > 1)
        again = list[RoutedAgain]()
        for _, at, flat in pooled_parts(message, message.input_length * wants, self._shape):
            ids = self._past_last_layer(self._stage.route, hidden, cache, at, flat)
            again.append(RoutedAgain(ids, at[: flat.n_tokens]))
        return again

    def programs(
        self,
        sizes: BatchSizes,
        weights_like: Callable[[FlatLayout], Sequence[Any]],
        cache: Any,
        hidden_like: Any,
    ) -> Iterator[ToCompile]:
        """All programs that rows may need.

        `hidden_like(n)` describes the hidden states of `n` tokens, `weights_like` the weights of a layout.
        """
        stage, shape = self._stage, sizes.shape
        for adapters in (False, True)[: 2 if shape.max_adapters else 1]:
            scored = scored_layout(shape.max_blocks, adapters=adapters)
            pooled = pooled_layout(shape, adapters=adapters)
            end = ", with adapters" if adapters else ""
            for name, program, layout, others in (
                ("a prompt's log-probabilities", stage.score, scored, ()),
                ("embeddings of prompts", stage.pool, pooled, (self._no_states,)),
                (
                    "the last layer's experts of prompts",
                    stage.route if stage.last_is_sparse else None,
                    pooled,
                    (),
                ),
            ):
                if program is not None:
                    buffer = self._words_like(stage.score_buffer.size(layout))
                    arrays = (weights_like(layout), hidden_like(SCORED), cache, buffer, *others)
                    yield ToCompile(name + end, partial(program.compile, *arrays, layout=layout))
        for n in sorted({layout.n_tokens for layout in sizes.layouts}, reverse=True):
            take = partial(stage.take.compile, hidden_like(n), self._words_like(SCORED))
            tokens = f"{n} tokens" if n > 1 else "1 token"
            yield ToCompile(f"a prompt's hidden states, {tokens}", take)

    def _words_like(self, n_words: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n_words,), jnp.int32, sharding=self._place)

    def _past_last_layer(
        self,
        program: Program,
        hidden: jax.Array,
        cache: LayerMemory,
        at: npt.NDArray[np.int32],
        flat: FlatBatch,
        *others: jax.Array,
    ) -> Any:
        """Run one of the stage's programs over the tokens `at` of the batch, laid out as `flat`."""
        tokens, buffer = jax.device_put((at, self._stage.score_buffer.fill(flat)), self._place)
        x = self._stage.take(hidden, tokens)
        return program(self._stage.weights_of(flat.layout), x, cache, buffer, *others, layout=flat.layout)
