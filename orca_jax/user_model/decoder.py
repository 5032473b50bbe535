"""A decoder whose layers a user wrote: they take x, positions and `attend`, and know nothing of requests.

The user's code is global, as in training: XLA partitions it by the weights' PartitionSpecs. Attention alone
is written for one device, and runs on each device's K/V heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.block import LayerOutput
from orca_jax.model.context import Attend, Iteration
from orca_jax.model.kv_cache import LayerCache, LayerMemory, write
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.shard import ALONE, Shard
from orca_jax.model.transformer import LayersOutput
from orca_jax.sharding.device_group import TENSOR
from orca_jax.sharding.specs import CACHE_SPEC

UserAttend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class UserLayer(Protocol):
    """A user's layer: an nnx module with this call."""

    def __call__(self, x: jax.Array, positions: jax.Array, attend: UserAttend, /) -> jax.Array:
        """x [..., H] to [..., H]; positions are integers that broadcast against x without its last axis.

        `attend(q, k, v)`, which a layer calls once, is causal attention with the scale head_size ** -0.5. q
        and its result are [..., N, D], k and v [..., K, D], and query head n attends to K/V head n * K // N.
        """
        ...


class UserModel(Protocol):
    """A user's model: an nnx module with these attributes and methods.

    `layers` is an nnx.List of layers with equal numbers of heads. The model may also have `eos_token_ids`,
    the `tokenizer` (a path to tokenizer.json), and `ffn_size`, the greatest width of a layer, from which
    memory for temporaries is estimated (default: 4 times `hidden_size`).
    """

    vocab_size: int
    n_positions: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    layers: Sequence[Any]  # of UserLayer

    def embed(self, token_ids: jax.Array, positions: jax.Array, /) -> jax.Array:
        """Embed token_ids at positions, both [...] int32, as the first layer's input [..., H]."""
        ...

    def unembed(self, x: jax.Array, /) -> jax.Array:
        """The last layer's output, [..., H], to logits [..., V]."""
        ...


def try_once(model: UserModel) -> None:
    """Trace a forward pass of three tokens, without a device. Raises ConfigError for an unexpected shape."""
    n = 3
    query, key = (n, model.n_heads, model.head_size), (n, model.n_kv_heads, model.head_size)

    graph, state = nnx.split(model)

    def forward(state: Any, token_ids: jax.Array) -> None:
        model: Any = nnx.merge(graph, state)
        positions = jnp.arange(n, dtype=jnp.int32)
        x = model.embed(token_ids, positions)
        if x.shape != (n, model.hidden_size):
            raise ConfigError(f"embed makes {x.shape} of {n} tokens, and hidden_size is {model.hidden_size}")
        for i, layer in enumerate(model.layers):
            n_calls = 0

            def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> jax.Array:
                nonlocal n_calls
                n_calls += 1
                if (q.shape, k.shape, v.shape) != (query, key, key):
                    raise ConfigError(
                        f"layer {i} calls attend with q {q.shape}, k {k.shape} and v {v.shape}; for {n} "
                        f"tokens n_heads, n_kv_heads and head_size say {query}, {key} and {key}"
                    )
                return jnp.zeros_like(q)

            x = layer(x, positions, attend)
            if n_calls != 1:
                raise ConfigError(
                    f"layer {i} calls attend {n_calls} times; it must call it once, because it has one cache"
                )
            if x.shape != (n, model.hidden_size):
                raise ConfigError(
                    f"layer {i} makes {x.shape} of {(n, model.hidden_size)}; it must keep the shape"
                )
        logits = model.unembed(x)
        if logits.ndim != 2 or logits.shape[0] != n or logits.shape[1] < model.vocab_size:
            raise ConfigError(
                f"unembed makes {logits.shape} of {n} tokens, and vocab_size is {model.vocab_size}"
            )

    jax.eval_shape(forward, state, jax.ShapeDtypeStruct((n,), jnp.int32))


@dataclass(frozen=True, slots=True)
class ModuleShapes:
    """The weights of a whole model by their names in it, without their numbers.

    Those in `optional` (random keys, counters, statistics) are no parameters, and an update may omit them.
    """

    held: Mapping[str, jax.ShapeDtypeStruct]
    optional: frozenset[str]


class UserParameters(dict[str, jax.Array]):
    """The weights of one stage by their names in the user's model, and the decoder with these weights.

    `names` are the names of all leaves of the decoder's state, in the order of `jax.tree.flatten`.
    """

    def __init__(self, decoder: "UserDecoder", weights: dict[str, jax.Array], names: Sequence[str]) -> None:
        # model_dtype reads the first one.
        floating = {name: w for name, w in weights.items() if jnp.issubdtype(w.dtype, jnp.floating)}
        super().__init__(floating | weights)
        self.decoder = decoder
        self.names = list(names)


class UserDecoder(nnx.Module):
    """A stage of a UserModel, with the methods of a Transformer.

    `rest` is the model without its layers, on the first and the last stage. `mesh` has the devices over which
    the layers are split, and is None for one device. Attention and hidden states have `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[nnx.Module],
        rest: nnx.Module | None,
        mesh: Mesh | None,
        dtype: jnp.dtype,
    ) -> None:
        self.config = config
        self.layers = nnx.List(layers)
        self.rest = rest
        self.mesh = mesh
        self.dtype = dtype

    def embed(
        self, token_ids: jax.Array, positions: jax.Array, shard: Shard = ALONE, product: Matmul = matmul
    ) -> jax.Array:
        """Transformer.embed."""
        model: Any = self.rest
        return self._whole(model.embed(token_ids, positions))

    def through(self, x: jax.Array, caches: Sequence[LayerMemory], iteration: Iteration) -> LayersOutput:
        """Transformer.through for all tokens, since a user's layer may combine tokens in any way."""
        assert iteration.wanted is None and iteration.tokens.cross is None
        slots = iteration.slot_of_token
        assert slots is not None

        # Traced once for all layers of a kind, as in Transformer.
        @partial(jax.jit, static_argnums=0)
        def run(graph: Any, weights: Any, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
            attention = _Attention(self.config, cache, slots, iteration.tokens.attend, self.mesh, self.dtype)
            out = nnx.merge(graph, weights)(x, iteration.positions, attention)
            assert attention.written is not None, "try_once checked that a layer calls attend"
            return self._whole(out), attention.written

        written: list[LayerMemory] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(cache, LayerCache)
            x, cache = run(*nnx.split(layer), x, cache)
            written.append(cache)
        x = x.astype(self.dtype)
        return LayersOutput(x, x, written)

    def last_layer(self, x: jax.Array, cache: LayerMemory, iteration: Iteration) -> LayerOutput:
        """Transformer.last_layer, which `through` has already run."""
        return LayerOutput(x, cache, None)

    def final_states(self, x: jax.Array, product: Matmul = matmul) -> jax.Array:
        """Transformer.final_states before any final norm, which only `unembed` knows."""
        return x

    def logits(self, x: jax.Array, shard: Shard = ALONE, product: Matmul = matmul) -> jax.Array:
        """Transformer.logits."""
        model: Any = self.rest
        logits = model.unembed(x)
        return self._whole(logits[:, : self.config.vocab_size].astype(jnp.float32))

    def _whole(self, x: jax.Array) -> jax.Array:
        """Gather x on every device."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P()))


class _Attention:
    """`attend` for one layer in one iteration: writes keys and values into the cache, and attends to it."""

    def __init__(
        self,
        config: ModelConfig,
        cache: LayerCache,
        slot_of_token: jax.Array,
        attend: Attend,
        mesh: Mesh | None,
        dtype: jnp.dtype,
    ) -> None:
        self._dtype = dtype
        self._config = config.attention
        self._cache = cache
        self._slot_of_token = slot_of_token
        self._attend = attend
        self._mesh = mesh
        self.written: LayerCache | None = None  # set by the call

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        n_tokens, heads, dtype = self._slot_of_token.shape[0], self._config, self._dtype
        by_group = q.reshape(n_tokens, heads.n_kv_heads, heads.group, heads.head_size).swapaxes(1, 2)
        compute = self._on_device
        if self._mesh is not None:
            split, grouped = P(None, TENSOR), P(None, None, TENSOR)
            compute = jax.shard_map(
                compute,
                mesh=self._mesh,
                in_specs=(grouped, split, split, CACHE_SPEC),
                out_specs=(grouped, CACHE_SPEC),
                check_vma=False,  # as in execution/stage.py
            )
        out, self.written = compute(by_group.astype(dtype), k.astype(dtype), v.astype(dtype), self._cache)
        return out.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)

    def _on_device(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Attend with one device's K/V heads: q [T, G, K, D]."""
        cache = write(cache, k, v, self._slot_of_token)
        return self._attend(q, cache, self._config, None, None), cache
