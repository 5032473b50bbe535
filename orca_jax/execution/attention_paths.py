"""The implementations of split attention that a stage's forward program may use."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.cudnn import split_attention as by_cudnn
from orca_jax.cudnn.paged_attention import paged_attention
from orca_jax.cudnn.tiles import TilePlan, tile_words
from orca_jax.families.attention_config import Attention as AttentionConfig
from orca_jax.families.attention_config import Latent
from orca_jax.iteration.flat_batch import FlatArrays, FlatLayout
from orca_jax.model import attention as pure_jax
from orca_jax.model.context import Attend, AttendAndPlace
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.latent import ByRow, plain_attention
from orca_jax.model.rotation import Rotation
from orca_jax.model.selection import Batch, selecting
from orca_jax.native.place import native_place
from orca_jax.native.plain_latent import native_plain_latent
from orca_jax.native.split_attention import native_split_attention
from orca_jax.pallas.latent_attention import latent_attention, latent_plan
from orca_jax.pallas.place import place
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items

SLAB = 64  # the fewest tokens of an absorbed slab, in a program that also runs rows in the plain form

Numbers = jax.Array | None  # `bias` or `sinks` of `Attend`


class _Options(TypedDict):
    """Keyword arguments that the pure JAX and the native attention have in common."""

    scale: float
    window: int | None
    chunked: bool
    soft_cap: float | None
    slopes: Numbers
    causal: bool
    relative: Numbers
    sinks: Numbers
    value_size: int | None


def _options(layer: AttentionConfig, bias: Numbers, sinks: Numbers) -> _Options:
    return {
        "scale": layer.scale,
        "window": layer.scores.window,
        "chunked": layer.scores.chunked,
        "soft_cap": layer.scores.soft_cap,
        "slopes": None if layer.scores.alibi is None else bias,
        "causal": layer.causal,
        "relative": None if layer.scores.relative is None else bias,
        "sinks": sinks,
        "value_size": layer.value_part,
    }


class AttentionPath(ABC):
    """An implementation of split attention, traced into a stage's forward program.

    A path may divide its work on the host, once for each iteration and for all layers. The result is a number
    of 32-bit words, which depends on the bucket alone; they follow the flat batch in the program's buffer.
    """

    def n_words(self, layout: FlatLayout) -> int:
        """Number of words that the host prepares for a bucket."""
        return 0

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """The words [n_words] of one iteration; `batch` holds numpy arrays."""
        return np.zeros(0, np.int32)

    @abstractmethod
    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """Attention bound to this iteration's tables; `batch` and `words` [n_words] are traced."""


@dataclass(frozen=True, slots=True)
class PureJax(AttentionPath):
    """XLA's own operations (model/attention.py). All layers share the iteration's tiles.

    Without `follow_lengths` a row costs as much as its layout's longest; and a layout of one token a row has
    no tiles of prompts.
    """

    follow_lengths: bool

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        work = None
        if self.follow_lengths or not layout.one_each:
            work = pure_jax.attention_work(
                batch.row_start, batch.kv_length, layout.n_tokens, follow_lengths=self.follow_lengths
            )

        def attend(
            q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            return pure_jax.split_attention(
                q[:, : layer.group],
                cache,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                work,
                follow_lengths=self.follow_lengths,
                positions=None if layer.causal or layer.scores.window is None else batch.positions,
                **_options(layer, bias, sinks),
            )

        return attend


@dataclass(frozen=True, slots=True)
class Native(AttentionPath):
    """native/split_attention.c, called once per layer."""

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        def attend(
            q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers, /
        ) -> jax.Array:
            return native_split_attention(
                q,
                cache.keys,
                cache.values,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                group=layer.group,
                **_options(layer, bias, sinks),
            )

        return _BesideWriter(attend, native_place)


@dataclass(frozen=True, slots=True)
class _BesideWriter(AttendAndPlace):
    """Attention bound to an iteration's tables, beside the kernel that writes the cache.

    `write` is native/place.py's or pallas/place.py's, which have one signature.
    """

    attend: Attend
    write: Callable[..., tuple[jax.Array, ...]]

    def __call__(
        self, q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers, /
    ) -> jax.Array:
        return self.attend(q, cache, layer, bias, sinks)

    def place(
        self,
        heads: jax.Array,
        values: jax.Array,
        slot_of_token: jax.Array,
        cache: LayerCache,
        rotation: Rotation | None,
        *,
        n_queries: int,
        key: int,
        interleaved: bool,
    ) -> tuple[jax.Array, LayerCache]:
        queries, *written = self.write(
            heads,
            values,
            slot_of_token,
            None if rotation is None else rotation.cos,
            None if rotation is None else rotation.sin,
            *jax.tree.leaves(cache),
            n_queries=n_queries,
            key=key,
            interleaved=interleaved,
        )
        return queries, LayerCache(*written)


@dataclass(frozen=True, slots=True)
class LatentByRow(AttentionPath):
    """Latent attention in the plain form for rows where that is less work, `absorbed` for all others.

    The plain form runs in C or in pure JAX. A program with one token for each row has no plain form.
    """

    absorbed: PureJax | Native
    latent: Latent
    in_c: bool

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        # If not even a prompt that fills the bucket is worth the plain form, no row of this program is.
        may_be_plain = self.latent.is_plain(layout.n_tokens, layout.n_tokens)
        if not may_be_plain or layout.n_tokens == layout.n_rows:
            return self.absorbed.bind(layout, batch, words)
        n_new = jnp.diff(batch.row_start)
        is_plain = self.latent.is_plain(n_new, batch.kv_length)
        plain_kv_length = jnp.where(is_plain, batch.kv_length, 0)
        # The other rows' tokens are laid end to end and cut into slabs.
        size = min(layout.n_tokens, max(layout.n_rows, SLAB))
        n_others = jnp.where(is_plain, 0, n_new)
        ends = jnp.cumsum(n_others)

        def slab(i: jax.Array) -> tuple[jax.Array, Attend]:
            place, first = i * size + jnp.arange(size, dtype=jnp.int32), i * size
            row = jnp.searchsorted(ends, place, side="right")
            token = (batch.row_start[1:] - ends).at[row].get(mode="clip") + place
            end = jnp.clip(ends - first, 0, size)
            start = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
            n_later = ends - jnp.minimum(ends, first + size)  # a row's tokens in later slabs
            kv_length = jnp.where(jnp.diff(start) > 0, batch.kv_length - n_later, 0)
            in_slab = batch._replace(row_start=start, kv_length=kv_length)
            attend = self.absorbed.bind(replace(layout, n_tokens=size), in_slab, words)
            return jnp.where(place < ends[-1], token, layout.n_tokens), attend

        def plain(q: jax.Array, cache: LayerCache, weight: jax.Array, layer: AttentionConfig) -> jax.Array:
            rows = (weight, batch.block_table, batch.row_start, plain_kv_length)
            if self.in_c:
                return native_plain_latent(q, cache.keys, *rows, scale=layer.scale)
            return plain_attention(q, cache, *rows, scale=layer.scale)

        return ByRow(self.absorbed.bind(layout, batch, words), plain, slab, -(-ends[-1] // size))


@dataclass(frozen=True, slots=True)
class Sparse(AttentionPath):
    """Attention to the `top_k` keys of each query that an indexer selects, in pure JAX (model/selection.py).

    Rows with at most that many keys take the path `dense`. With `follow_lengths` each row takes its own way;
    otherwise all rows of a layout do, by the longest context that the layout holds.
    """

    dense: AttentionPath
    top_k: int
    block_size: int
    follow_lengths: bool

    def _is_dense(self, layout: FlatLayout) -> bool:
        """Whether no row of the layout can have more keys than it selects."""
        return layout.max_blocks * self.block_size <= self.top_k

    def n_words(self, layout: FlatLayout) -> int:
        return self.dense.n_words(layout) if self._is_dense(layout) else 0

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        if not self._is_dense(layout):
            return np.zeros(0, np.int32)
        return self.dense.words(layout, batch)

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        if self._is_dense(layout):
            return self.dense.bind(layout, batch, words)
        selects = batch.kv_length > (self.top_k if self.follow_lengths else 0)
        dense = None
        if self.follow_lengths:
            others = batch._replace(kv_length=jnp.where(selects, 0, batch.kv_length))
            dense = self.dense.bind(layout, others, words)
        rows = (batch.block_table, batch.row_start, batch.kv_length, selects)
        sizes = (layout.n_tokens, layout.one_each, self.follow_lengths)
        return selecting(Batch(*rows, *sizes), self.top_k, self.block_size, dense)


@dataclass(frozen=True, slots=True)
class Kernel(AttentionPath):
    """The Mosaic GPU kernel (pallas/split_attention.py), one launch per layer.

    The host makes a work list for each of the model's `windows`. Each of `n_kv_heads` has `group` query
    heads; `n_cores` is the number of streaming multiprocessors. `fixed` splits rows at fixed positions;
    `interpret` runs the kernel on the CPU.
    """

    n_kv_heads: int
    group: int
    n_cores: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    fixed: bool = False
    interpret: bool = False

    def _plans(self, layout: FlatLayout) -> list[Plan]:
        sizes = (layout.n_tokens, layout.n_rows, self.n_kv_heads, self.group, self.block_size, self.n_cores)
        plans = [Plan(*sizes, window=window) for window in self.windows]
        max_keys = layout.max_blocks * self.block_size
        return [plan.fixed(max_keys) for plan in plans] if self.fixed else plans

    def n_words(self, layout: FlatLayout) -> int:
        return sum(math.prod(plan.list_shape) for plan in self._plans(layout))

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        lists = [work_items(batch.row_start, batch.kv_length, plan) for plan in self._plans(layout)]
        return np.concatenate(lists).ravel()

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        plans = self._plans(layout)
        lists = words.reshape(len(plans), *plans[0].list_shape)
        work_of = {plan.window: (plan, lists[i]) for i, plan in enumerate(plans)}

        def attend(
            q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            plan, work = work_of[layer.scores.window]
            return split_attention(
                q,
                *cache.both,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                scale=layer.scale,
                window=layer.scores.window,
                soft_cap=layer.scores.soft_cap,
                work=work,
                plan=plan,
                interpret=self.interpret,
            )

        return _BesideWriter(attend, partial(place, interpret=self.interpret))


@dataclass(frozen=True, slots=True)
class LatentKernel(AttentionPath):
    """The Mosaic GPU kernel for latent attention (pallas/latent_attention.py), one launch per layer.

    All rows take the absorbed form; `n_heads` query heads share the one head in the cache. The rest is as in
    Kernel.
    """

    n_heads: int
    n_cores: int
    block_size: int
    fixed: bool = False
    interpret: bool = False

    def _plan(self, layout: FlatLayout) -> Plan:
        sizes = (layout.n_tokens, layout.n_rows, self.n_heads, self.block_size, self.n_cores)
        plan = latent_plan(*sizes)
        return plan.fixed(layout.max_blocks * self.block_size) if self.fixed else plan

    def n_words(self, layout: FlatLayout) -> int:
        return math.prod(self._plan(layout).list_shape)

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        return work_items(batch.row_start, batch.kv_length, self._plan(layout)).ravel()

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        plan = self._plan(layout)
        work = words.reshape(plan.list_shape)

        def attend(
            q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            assert layer.latent is not None
            attended = latent_attention(
                q[:, :, 0],
                cache.keys,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                rank=layer.latent.rank,
                scale=layer.scale,
                work=work,
                plan=plan,
                interpret=self.interpret,
            )
            return attended[:, :, None]

        return attend


@dataclass(frozen=True, slots=True)
class Cudnn(AttentionPath):
    """cuDNN's paged attention (cudnn/split_attention.py).

    The host's words, the tiles and each token's place in the results, serve all of the model's `windows`.
    With one token a row there are no tiles, so cuDNN is called once for each layer. A kernel writes the cache
    if it `places` (pallas/place.py), otherwise XLA does. Tests, which have no such GPU, pass the reference as
    `call`, and `interpret` that kernel.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    call: by_cudnn.PagedAttention = paged_attention
    places: bool = True
    interpret: bool = False

    def _plan(self, layout: FlatLayout) -> TilePlan:
        return TilePlan(layout.n_tokens, layout.n_rows, layout.one_each)

    def n_words(self, layout: FlatLayout) -> int:
        return self._plan(layout).n_words

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        return tile_words(batch.row_start, self._plan(layout))

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        make = partial(by_cudnn.attention_work, plan=self._plan(layout), block_size=self.block_size)
        rows = (batch.block_table, batch.row_start, batch.kv_length)
        work_of = {window: make(*rows, words, window=window) for window in self.windows}

        def attend(
            q: jax.Array, cache: LayerCache, layer: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            window = layer.scores.window
            options = {"group": layer.group, "scale": layer.scale, "window": window, "sinks": sinks}
            return by_cudnn.split_attention(q, *cache.both, work_of[window], **options, call=self.call)

        return _BesideWriter(attend, partial(place, interpret=self.interpret)) if self.places else attend
