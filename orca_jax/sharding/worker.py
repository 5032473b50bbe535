"""A worker: one stage's parameters, K/V cache and programs. It issues work and never waits for it."""

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention, ModelConfig, ServingConfig
from orca_jax.control import ControlMessage
from orca_jax.flat_batch import FlatBatch, FlatLayout, Sampler, padding_batch
from orca_jax.model.gpt import Parameters
from orca_jax.model.kv_cache import LayerCache, cache_shape
from orca_jax.sharding.attention_path import choose_attention
from orca_jax.sharding.link import DeviceLink, Link
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC
from orca_jax.sharding.stage import Stage


class DeviceTokens:
    """The tokens of an issued iteration, on their way to the host."""

    def __init__(self, tokens: jax.Array) -> None:
        tokens.copy_to_host_async()
        self._tokens = tokens

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        return self._tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # jax's stub lacks it

    def fetch(self) -> npt.NDArray[np.int32]:
        """[R] int32, after waiting for the device; what failed there is raised here."""
        return np.asarray(self._tokens)


class Worker:
    """One stage of an engine: its part of the parameters and of every layer's cache, and its programs.

    `n_rows` is the size of `last_token`: the places of all admitted requests. Caches are made in the
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
        )
        self.stage = Stage(config, parameters, part, attention=self.attention.path)
        self._next = next_worker
        self._link: Link | None = None if next_worker is None else DeviceLink(next_worker.stage.part.group)
        self._place = group.place()
        self._hidden_size = config.hidden_size
        self._n_rows, self._n_slots = n_rows, serving.n_blocks * serving.block_size
        # Made on their devices and committed to them, as the programs give them back: else each program
        # would compile twice.
        shape = cache_shape(config, n_blocks=serving.n_blocks, block_size=serving.block_size)
        self._empty = jax.jit(lambda: jnp.zeros(shape, self._dtype), out_shardings=group.place(CACHE_SPEC))
        self._caches: list[LayerCache] = []
        self._last_token: jax.Array | None = None
        self.renew()

    def renew(self) -> None:
        """Give the caches up, whatever state they are in, and make empty ones."""
        self._caches, self._last_token = [], None
        self._caches = [LayerCache(self._empty(), self._empty()) for _ in self.stage.part.layers]
        if self.stage.part.last:
            self._last_token = jax.device_put(jnp.zeros(self._n_rows, jnp.int32), self._place)

    def issue(
        self, message: ControlMessage, flat: FlatBatch, hidden: jax.Array | None = None
    ) -> DeviceTokens:
        """Start one iteration of this stage and of those behind it, and return at once.

        A device runs what it is given in order, so caches and last_token of one iteration are whole before
        the next reads them. `hidden` comes from the stage before. `message` is what a worker in another
        process would need; here `flat` says all.
        """
        out = self.compute(flat, hidden)
        if self._next is None:
            return DeviceTokens(out)
        assert self._link is not None
        return self._next.issue(message, flat, self._link.send(out))

    def compute(self, flat: FlatBatch, hidden: jax.Array | None) -> jax.Array:
        """Start this stage's part: the hidden array [T, H], or from the last stage the tokens [R] int32."""
        words = self.attention.path.words(flat.layout, flat.arrays)
        whole = np.concatenate((flat.buffer, words)) if len(words) else flat.buffer
        buffer = jax.device_put(whole, self._place)
        part = self.stage.part
        arrived = self._last_token if part.first else hidden
        out, self._caches = self.stage.forward(
            self.stage.weights, self._caches, arrived, buffer, layout=flat.layout
        )
        if not part.last:
            return out
        logits, rows = out
        tokens, self._last_token = self.stage.choose(logits, rows, self._last_token, sampler=flat.sampler)
        return tokens

    def hidden_like(self, n_tokens: int) -> jax.ShapeDtypeStruct:
        """What `compute` takes from the stage before for a bucket, [T, H], and where it lies."""
        return jax.ShapeDtypeStruct((n_tokens, self._hidden_size), self._dtype, sharding=self._place)

    def make_programs(self, bucket_sizes: Sequence[int], *, max_bs: int, max_blocks: int) -> None:
        """Compile all that `compute` may ask for, and wait for it: each runs once, on padding alone."""
        part = self.stage.part
        for n_tokens in bucket_sizes:
            layout = FlatLayout(n_tokens, min(n_tokens, max_bs), max_blocks)
            hidden = None
            if not part.first:
                like = self.hidden_like(n_tokens)
                hidden = jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)
            samplers: set[Sampler] = set(get_args(Sampler)) if part.last else {"greedy"}
            for sampler in samplers:
                empty = padding_batch(layout, n_slots=self._n_slots, n_rows=self._n_rows, sampler=sampler)
                self.compute(empty, hidden).block_until_ready()
