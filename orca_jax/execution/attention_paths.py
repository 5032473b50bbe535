"""The implementations of split attention, each as a path of a stage's forward program.

A path is traced into the forward program. If it also has work for the host, the host does it once per
iteration, and passes it as words after the flat batch's buffer.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypedDict, runtime_checkable

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
from orca_jax.model.context import Attend, Placing
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.latent import ByRow, plain_attention
from orca_jax.model.rotation import Rotation
from orca_jax.native.place import native_place
from orca_jax.native.plain_latent import native_plain_latent
from orca_jax.native.split_attention import native_split_attention
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items

SLAB = 64  # tokens in the absorbed form at a time, at least, beside rows in the plain one

Numbers = jax.Array | None  # what is added to the scores, or sinks, in a form that `Attend` describes


class _Form(TypedDict):
    """A layer's attention as keyword arguments of pure JAX and C."""

    scale: float
    window: int | None
    soft_cap: float | None
    slopes: Numbers
    causal: bool
    relative: Numbers
    sinks: Numbers
    value_size: int | None


def _form(own: AttentionConfig, bias: Numbers, sinks: Numbers) -> _Form:
    return {
        "scale": own.scale,
        "window": own.scores.window,
        "soft_cap": own.scores.soft_cap,
        "slopes": None if own.scores.alibi is None else bias,
        "causal": own.causal,
        "relative": None if own.scores.relative is None else bias,
        "sinks": sinks,
        "value_size": own.value_part,
    }


class AttentionPath(Protocol):
    """An implementation of split attention."""

    def n_words(self, layout: FlatLayout) -> int:
        """The number of 32-bit words that the host prepares for a bucket."""
        ...

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """Attention bound to this iteration's tables; `batch` and `words` [n_words] are traced."""
        ...


@runtime_checkable
class HostWork(Protocol):
    """A path for which the host prepares words."""

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """The words [n_words] for one iteration; `batch` holds numpy arrays."""
        ...


@dataclass(frozen=True, slots=True)
class PureJax:
    """XLA's own operations (model/attention.py)."""

    follow_lengths: bool

    def n_words(self, layout: FlatLayout) -> int:
        """0: the work is divided on the device."""
        return 0

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """The tiles of both phases are made once and shared by all layers."""
        work = pure_jax.attention_work(
            batch.row_start, batch.kv_length, layout.n_tokens, follow_lengths=self.follow_lengths
        )

        def attend(
            q: jax.Array, cache: LayerCache, own: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            return pure_jax.split_attention(
                q[:, : own.group],
                cache,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                work,
                follow_lengths=self.follow_lengths,
                **_form(own, bias, sinks),
            )

        return attend


@dataclass(frozen=True, slots=True)
class Native:
    """native/split_attention.c, called once per layer."""

    def n_words(self, layout: FlatLayout) -> int:
        """0: it reads the batch's own tables."""
        return 0

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        return _NativeAttend(batch)


@dataclass(frozen=True, slots=True)
class _NativeAttend(Placing):
    """Attention and the writing of the cache in C, bound to an iteration's tables."""

    batch: FlatArrays

    def __call__(
        self, q: jax.Array, cache: LayerCache, own: AttentionConfig, bias: Numbers, sinks: Numbers, /
    ) -> jax.Array:
        return native_split_attention(
            q,
            cache.keys,
            cache.values,
            self.batch.block_table,
            self.batch.row_start,
            self.batch.kv_length,
            group=own.group,
            **_form(own, bias, sinks),
        )

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
        """In one call into C (native/place.c)."""
        queries, *written = native_place(
            heads,
            values,
            slot_of_token,
            None if rotation is None else rotation.cos,
            None if rotation is None else rotation.sin,
            *cache.both,
            n_queries=n_queries,
            key=key,
            interleaved=interleaved,
        )
        return queries, LayerCache(*written)


@dataclass(frozen=True, slots=True)
class LatentByRow:
    """Latent attention that is in the plain form in rows where that is less work: in C, or in pure JAX.

    The other rows take `absorbed`, and so do all rows of a program with one token for each row.
    """

    absorbed: PureJax | Native
    latent: Latent
    in_c: bool

    def n_words(self, layout: FlatLayout) -> int:
        """0, as of both forms."""
        return 0

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        some = self.latent.is_plain(layout.n_tokens, layout.n_tokens)  # a whole prompt; else no row is
        if not some or layout.n_tokens == layout.n_rows:
            return self.absorbed.bind(layout, batch, words)
        n_new = jnp.diff(batch.row_start)
        is_plain = self.latent.is_plain(n_new, batch.kv_length)
        of_plain = jnp.where(is_plain, batch.kv_length, 0)
        # The other rows' tokens, one after the other, are cut into slabs.
        size = min(layout.n_tokens, max(layout.n_rows, SLAB))
        n_others = jnp.where(is_plain, 0, n_new)
        ends = jnp.cumsum(n_others)

        def slab(i: jax.Array) -> tuple[jax.Array, Attend]:
            place, first = i * size + jnp.arange(size, dtype=jnp.int32), i * size
            row = jnp.searchsorted(ends, place, side="right")
            token = (batch.row_start[1:] - ends).at[row].get(mode="clip") + place
            end = jnp.clip(ends - first, 0, size)
            start = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
            later = ends - jnp.minimum(ends, first + size)  # of a row's tokens
            there = jnp.where(jnp.diff(start) > 0, batch.kv_length - later, 0)
            own = batch._replace(row_start=start, kv_length=there)
            attend = self.absorbed.bind(replace(layout, n_tokens=size), own, words)
            return jnp.where(place < ends[-1], token, layout.n_tokens), attend

        def plain(q: jax.Array, cache: LayerCache, makes: jax.Array, own: AttentionConfig) -> jax.Array:
            rows = (makes, batch.block_table, batch.row_start, of_plain)
            if self.in_c:
                return native_plain_latent(q, cache.keys, *rows, scale=own.scale)
            return plain_attention(q, cache, *rows, scale=own.scale)

        return ByRow(self.absorbed.bind(layout, batch, words), plain, slab, -(-ends[-1] // size))


@dataclass(frozen=True, slots=True)
class Kernel:
    """The Mosaic GPU kernel (pallas/split_attention.py): one launch per layer, its work lists made on the
    host.

    `n_kv_heads` (K), each with `group` query heads; `n_cores` streaming multiprocessors; K/V blocks of
    `block_size` slots; `windows`, one list for each. `fixed` splits rows at fixed positions. `interpret` runs
    it on the CPU.
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
        """The words of the work lists."""
        return sum(math.prod(plan.list_shape) for plan in self._plans(layout))

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        lists = [work_items(batch.row_start, batch.kv_length, plan) for plan in self._plans(layout)]
        return np.concatenate(lists).ravel()

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        plans = self._plans(layout)
        lists = words.reshape(len(plans), *plans[0].list_shape)
        work_of = {plan.window: (plan, lists[i]) for i, plan in enumerate(plans)}

        def attend(
            q: jax.Array, cache: LayerCache, own: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            plan, work = work_of[own.scores.window]
            return split_attention(
                q,
                *cache.both,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                scale=own.scale,
                window=own.scores.window,
                soft_cap=own.scores.soft_cap,
                work=work,
                plan=plan,
                interpret=self.interpret,
            )

        return attend


@dataclass(frozen=True, slots=True)
class Cudnn:
    """cuDNN's paged attention (cudnn/split_attention.py) over blocks of `block_size` slots.

    The host's words serve all `windows`. Tests, which have no such GPU, pass a reference as `call`.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    call: by_cudnn.PagedAttention = paged_attention

    def _plan(self, layout: FlatLayout) -> TilePlan:
        return TilePlan(layout.n_tokens, layout.n_rows)

    def n_words(self, layout: FlatLayout) -> int:
        """The words of the tiles, and of the position of each token's result."""
        return self._plan(layout).n_words

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        return tile_words(batch.row_start, self._plan(layout))

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        make = partial(by_cudnn.attention_work, plan=self._plan(layout), block_size=self.block_size)
        rows = (batch.block_table, batch.row_start, batch.kv_length)
        work_of = {window: make(*rows, words, window=window) for window in self.windows}

        def attend(
            q: jax.Array, cache: LayerCache, own: AttentionConfig, bias: Numbers, sinks: Numbers
        ) -> jax.Array:
            window = own.scores.window
            options = {"group": own.group, "scale": own.scale, "window": window, "sinks": sinks}
            return by_cudnn.split_attention(q, *cache.both, work_of[window], **options, call=self.call)

        return attend
