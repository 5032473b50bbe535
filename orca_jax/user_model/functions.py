# pyright: standard
"""Makes a user's model of plain functions of its weights."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from orca_jax.errors import ConfigError
from orca_jax.user_model.decoder import UserAttend


class FunctionModel(nnx.Module):
    """A UserModel (decoder.py) of three functions; `LLM(model=...)` takes it.

    `embed(outside, token_ids, positions)`, `layer(weights, x, positions, attend)` and `unembed(outside, x)`
    are the methods there. `outside` and the `weights` of each of `layers` are pytrees of arrays; specs are
    pytrees of the same structure with a PartitionSpec or None for each array. All layers share `layer_specs`.
    New weights for `LLM.update_weights` are `{"outside": outside, "layers": layers}`.
    """

    def __init__(
        self,
        *,
        embed: Callable[[Any, jax.Array, jax.Array], jax.Array],
        layer: Callable[[Any, jax.Array, jax.Array, UserAttend], jax.Array],
        unembed: Callable[[Any, jax.Array], jax.Array],
        outside: Any,
        layers: Sequence[Any],
        vocab_size: int,
        n_positions: int,
        hidden_size: int,
        n_heads: int,
        n_kv_heads: int,
        head_size: int,
        outside_specs: Any = None,
        layer_specs: Any = None,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: str | None = None,
    ) -> None:
        self.vocab_size, self.n_positions, self.hidden_size = vocab_size, n_positions, hidden_size
        self.n_heads, self.n_kv_heads, self.head_size = n_heads, n_kv_heads, head_size
        self.eos_token_ids, self.tokenizer = eos_token_ids, tokenizer
        self.outside = _Weights(outside, outside_specs)
        self.layers = nnx.List([_Layer(layer, weights, layer_specs) for weights in layers])
        self._embed, self._unembed = embed, unembed

    def embed(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """UserModel.embed."""
        return self._embed(self.outside._tree(), token_ids, positions)

    def unembed(self, x: jax.Array) -> jax.Array:
        """UserModel.unembed."""
        return self._unembed(self.outside._tree(), x)


class _Weights(nnx.Module):
    """A pytree of arrays with their specs; each array is an attribute, named by its path in the tree."""

    def __init__(self, tree: Any, specs: Any) -> None:
        paths, self._form = jax.tree_util.tree_flatten_with_path(tree)
        by_leaf = [None] * len(paths)
        if specs is not None:
            by_leaf = self._form.flatten_up_to(specs)
        self._names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
        for name, (_, leaf), spec in zip(self._names, paths, by_leaf, strict=True):
            if hasattr(self, name):
                raise ConfigError(f"a weight is named {name!r}, which names cannot be; rename it")
            setattr(self, name, _parameter(leaf, spec))

    def _tree(self) -> Any:
        return jax.tree.unflatten(self._form, [getattr(self, name)[...] for name in self._names])


class _Layer(_Weights):
    def __init__(self, function: Callable[..., jax.Array], tree: Any, specs: Any) -> None:
        super().__init__(tree, specs)
        self._function = function

    def __call__(self, x: jax.Array, positions: jax.Array, attend: UserAttend) -> jax.Array:
        return self._function(self._tree(), x, positions, attend)


def _parameter(array: jax.Array, spec: PartitionSpec | None) -> nnx.Param:
    if spec is None:
        return nnx.Param(array)
    return nnx.Param(array, out_sharding=tuple(spec), eager_sharding=False)
