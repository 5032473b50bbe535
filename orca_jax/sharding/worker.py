"""A worker: one stage's parameters, K/V cache and programs. It issues work and never waits for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.batch_sizes import BatchSizes
from orca_jax.config import Attention, ModelConfig, ServingConfig
from orca_jax.control import ControlMessage, MakeWords
from orca_jax.flat_batch import FlatBatch, padding_batch
from orca_jax.model.gpt import Parameters
from orca_jax.model.kv_cache import LayerCache, cache_shape
from orca_jax.sharding.attention_path import choose_attention
from orca_jax.sharding.link import DeviceLink, Link
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC
from orca_jax.sharding.stage import SCORED, Last, Stage
from orca_jax.sharding.token_chooser import DeviceTokens, TokenChooser


class Worker:
    """One stage of an engine: its part of the parameters and of every layer's cache, and its programs.

    `n_rows` are the places of all admitted requests. Caches are made in the
    parameters' dtype. `attention` is chosen by device and model unless given; raises ConfigError where that
    cannot run. `next_worker` has the layers behind this stage's, in the same process; `issue` needs one
    unless this stage is the last, which samples.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        serving: ServingConfig,
        part: StagePart,
        *,
        n_rows: int,
        attention: Attention | None = None,
        next_worker: "Worker | None" = None,
    ) -> None:
        assert not (part.last and next_worker is not None), "the last stage has none behind it"
        group, self._dtype = part.group, next(iter(parameters.values())).dtype
        self.attention = choose_attention(
            group.devices[0],
            config,
            n_heads=config.n_heads // len(group),
            block_size=serving.block_size,
            dtype=self._dtype,
            forced=attention,
            deterministic=serving.deterministic,
        )
        self.stage = Stage(config, parameters, part, attention=self.attention.path)
        self._next = next_worker
        self._link: Link | None = None if next_worker is None else DeviceLink(next_worker.stage.part.group)
        self._place = group.place()
        self._hidden_size = config.hidden_size
        # Made on their devices and committed to them, as the programs give them back: else each program
        # would compile twice.
        shape = cache_shape(config, n_blocks=serving.n_blocks, block_size=serving.block_size)
        self._empty = jax.jit(lambda: jnp.zeros(shape, self._dtype), out_shardings=group.place(CACHE_SPEC))
        self._caches: list[LayerCache] = []
        self._chooser = TokenChooser(config.vocab_size, n_rows, self._place) if part.last else None
        self.renew()

    def renew(self) -> None:
        """Give the caches up, whatever state they are in, and make empty ones."""
        self._caches = []
        self._caches = [LayerCache(self._empty(), self._empty()) for _ in self.stage.part.layers]
        if self._chooser is not None:
            self._chooser.renew()

    def issue(
        self,
        message: ControlMessage,
        flat: FlatBatch,
        words: MakeWords,
        hidden: jax.Array | None = None,
    ) -> DeviceTokens:
        """Start one iteration of this stage and of those behind it, and return at once.

        A device runs what it is given in order, so what is kept on it is whole before the next iteration
        reads it. `hidden` comes from the stage before. `words` is called when the forward passes of all
        stages have been started.
        """
        out = self.forward(flat, hidden)
        if self._next is None:
            return self.choose(out, message, flat, words)
        assert self._link is not None
        return self._next.issue(message, flat, words, self._link.send(out))

    def forward(self, flat: FlatBatch, hidden: jax.Array | None) -> Any:
        """Start this stage's forward pass: the hidden array [T, H], or `stage.Last` from the last stage."""
        attention = self.attention.path.words(flat.layout, flat.arrays)
        whole = np.concatenate((flat.buffer, attention)) if len(attention) else flat.buffer
        buffer = jax.device_put(whole, self._place)
        part, arrived = self.stage.part, hidden
        if part.first:
            arrived = None if self._chooser is None else self._chooser.last_token
        out, self._caches = self.stage.forward(
            self.stage.weights, self._caches, arrived, buffer, layout=flat.layout
        )
        return out

    def choose(self, last: Last, message: ControlMessage, flat: FlatBatch, words: MakeWords) -> DeviceTokens:
        """Start the choice of the next tokens, on the last stage."""
        assert self._chooser is not None
        prompts = self._score(last.hidden, message)
        tokens, logprobs = self._chooser.choose(last.logits, last.rows, message, flat, words)
        return DeviceTokens(tokens, logprobs, prompts)

    def hidden_like(self, n_tokens: int) -> jax.ShapeDtypeStruct:
        """What `forward` takes from the stage before for a bucket, [T, H], and where it lies."""
        return jax.ShapeDtypeStruct((n_tokens, self._hidden_size), self._dtype, sharding=self._place)

    def make_programs(self, sizes: BatchSizes) -> None:
        """Compile all that an iteration may ask for, and wait for it: each runs once, on padding alone."""
        made = set[int]()
        for layout in sizes.layouts:
            hidden = None
            if not self.stage.part.first:
                like = self.hidden_like(layout.n_tokens)
                hidden = jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)
            out = self.forward(padding_batch(layout, n_slots=sizes.n_slots, n_rows=sizes.n_rows), hidden)
            if self._chooser is None:
                out.block_until_ready()
                continue
            nothing = np.zeros(SCORED, np.int32)
            self._score_part(out.hidden, nothing, nothing).block_until_ready()
            if layout.n_rows not in made:
                made.add(layout.n_rows)
                self._chooser.make_programs(out.logits, out.rows)

    def _score(self, hidden: jax.Array, message: ControlMessage) -> dict[int, list[tuple[jax.Array, int]]]:
        """The log-probabilities of prompts, where they are asked for: by place in the batch, in parts."""
        scored: dict[int, list[tuple[jax.Array, int]]] = {}
        ends = np.cumsum(message.input_length)
        for i in np.flatnonzero(message.sampling["prompt_logprobs"] >= 0):
            first = ends[i] - message.input_length[i]
            at = np.arange(first, first + message.n_prompt[i] - 1, dtype=np.int32)
            parts = scored[int(i)] = []
            for begin in range(0, len(at), SCORED):
                part = at[begin : begin + SCORED]
                padded = np.zeros((2, SCORED), np.int32)
                padded[:, : len(part)] = part, message.token_ids[part + 1]
                parts.append((self._score_part(hidden, *padded), len(part)))
        return scored

    def _score_part(
        self, hidden: jax.Array, at: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
    ) -> jax.Array:
        return self.stage.score(self.stage.weights, hidden, *jax.device_put((at, targets), self._place))
