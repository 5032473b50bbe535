"""Which split attention a stage's forward program runs: chosen here and nowhere else.

| device | by default | tested |
|---|---|---|
| CPU with AVX-512 | in C, by the machine's own compiler (native/) | each test run |
| another CPU, no compiler, or a model without a form | pure JAX, following the real lengths | each test run |
| Hopper GPU (compute capability 9.0) | the Mosaic GPU kernel | interpreted on the CPU; compiled |
| any other accelerator, or a model the kernel has no form for | pure JAX, static shapes | on the CPU |

A path has two halves: what the host prepares once per iteration, as words behind the flat batch's buffer, and
what is traced into the forward program.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.flat_batch import FlatArrays, FlatLayout
from orca_jax.model import attention as pure_jax
from orca_jax.model.gpt import Attend
from orca_jax.model.kv_cache import LayerCache
from orca_jax.native import split_attention as native
from orca_jax.native.compiler import NotBuilt
from orca_jax.pallas.kernel_shape import unsupported
from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_items import ENTRY, Plan, work_items

_HOPPER = "9.0"
_FOLLOWING = "pure JAX, following the real lengths"
_NO_WORDS = np.zeros(0, np.int32)

Device = Any  # a jax.Device


class AttentionPath(Protocol):
    """One way to run split attention."""

    def n_words(self, layout: FlatLayout) -> int:
        """32-bit words that the host prepares for a bucket."""
        ...

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """Them [n_words], for one iteration; `batch` holds numpy arrays."""
        ...

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """Attention with this iteration's tables bound; `batch` and `words` [n_words] are traced."""
        ...


@dataclass(frozen=True, slots=True)
class PureJax:
    """XLA's own operations (model/attention.py)."""

    follow_lengths: bool

    def n_words(self, layout: FlatLayout) -> int:
        """None: the work is cut up on the device."""
        return 0

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """[0]."""
        return _NO_WORDS

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """The tiles of both phases are made once, and used by every layer."""
        work = pure_jax.attention_work(
            batch.row_start, batch.kv_length, layout.n_tokens, follow_lengths=self.follow_lengths
        )
        return partial(
            pure_jax.split_attention,
            block_table=batch.block_table,
            row_start=batch.row_start,
            kv_length=batch.kv_length,
            work=work,
            follow_lengths=self.follow_lengths,
        )


@dataclass(frozen=True, slots=True)
class Native:
    """One call a layer of what native/split_attention.c does."""

    def n_words(self, layout: FlatLayout) -> int:
        """None: it reads the batch's own tables."""
        return 0

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """[0]."""
        return _NO_WORDS

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """The same tables for every layer."""

        def attend(q: jax.Array, cache: LayerCache) -> jax.Array:
            return native.native_split_attention(
                q, cache.keys, cache.values, batch.block_table, batch.row_start, batch.kv_length
            )

        return attend


@dataclass(frozen=True, slots=True)
class Kernel:
    """The Mosaic GPU kernel (pallas/split_attention.py): one launch a layer, its list made on the host.

    K `n_kv_heads` of `group` query heads each; `n_cores` streaming multiprocessors. With `fixed_block` rows
    are split at fixed places; it is the size of a K/V block then, else 0. `interpret` runs it on the CPU, for
    tests.
    """

    n_kv_heads: int
    group: int
    n_cores: int
    fixed_block: int = 0
    interpret: bool = False

    def _plan(self, layout: FlatLayout) -> Plan:
        plan = Plan(layout.n_tokens, layout.n_rows, self.n_kv_heads, self.group, n_cores=self.n_cores)
        return plan.fixed(layout.max_blocks * self.fixed_block) if self.fixed_block else plan

    def n_words(self, layout: FlatLayout) -> int:
        """Those of the list of work."""
        return self._plan(layout).n_records * len(ENTRY)

    def words(self, layout: FlatLayout, batch: FlatArrays) -> npt.NDArray[np.int32]:
        """The list, flat."""
        return work_items(batch.row_start, batch.kv_length, self._plan(layout)).ravel()

    def bind(self, layout: FlatLayout, batch: FlatArrays, words: jax.Array) -> Attend:
        """The same list for every layer."""
        plan = self._plan(layout)
        work = words.reshape(plan.n_records, len(ENTRY))

        def attend(q: jax.Array, cache: LayerCache) -> jax.Array:
            return split_attention(
                q,
                cache.keys,
                cache.values,
                batch.block_table,
                batch.row_start,
                batch.kv_length,
                work=work,
                plan=plan,
                interpret=self.interpret,
            )

        return attend


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A path, what kind it is, and what to say of it at start-up."""

    path: AttentionPath
    kind: Attention
    said: str


def choose_attention(
    device: Device,
    config: ModelConfig,
    *,
    n_heads: int,
    block_size: int,
    dtype: Any,
    forced: Attention | None = None,
    deterministic: bool = False,
) -> AttentionChoice:
    """The attention for K/V blocks of `block_size` slots of `dtype` on a device, or the one that is `forced`.

    `n_heads` are those that the device has of the model's. `deterministic`: rows are split at fixed places.

    Raises ConfigError where the forced one cannot run there.
    """
    if forced == "native" or (forced is None and device.platform == "cpu"):
        reason = _not_native(device, config.head_size, block_size, np.dtype(dtype).name, n_heads)
        if reason is None:
            return AttentionChoice(Native(), "native", "native split attention")
        if forced is not None:
            raise _cannot(forced, reason)
        said = f"{_FOLLOWING}: {reason}"
        return AttentionChoice(PureJax(follow_lengths=True), "follow_lengths", said)
    if forced == "follow_lengths":
        return AttentionChoice(PureJax(follow_lengths=True), "follow_lengths", _FOLLOWING)
    if forced == "static":
        return AttentionChoice(PureJax(follow_lengths=False), "static", "pure JAX, static shapes")
    fixed_block = block_size if deterministic else 0
    kernel = Kernel(n_heads, 1, n_cores=getattr(device, "core_count", 2), fixed_block=fixed_block)
    reason = unsupported(config.head_size, block_size, np.dtype(dtype).name, n_heads, n_heads)
    if forced == "interpreted":
        kernel = replace(kernel, n_cores=1, interpret=True)
    else:
        reason = _not_hopper(device) or reason
    if reason is None:
        kind: Attention = "interpreted" if kernel.interpret else "kernel"
        return AttentionChoice(kernel, kind, f"split-attention kernel{', interpreted' * kernel.interpret}")
    if forced is None:
        return AttentionChoice(PureJax(follow_lengths=False), "static", f"pure JAX, static shapes: {reason}")
    raise _cannot(forced, reason)


def _cannot(forced: Attention, reason: str) -> ConfigError:
    return ConfigError(
        f"attention is {forced!r}, but {reason}; leave it out, and what can run here is chosen"
    )


def _not_native(device: Device, head_size: int, block_size: int, dtype: str, n_heads: int) -> str | None:
    if device.platform != "cpu":
        return f"{device.device_kind} is no CPU"
    reason = native.unsupported(head_size, block_size, dtype, n_heads, n_heads)
    if reason is None:
        try:
            native.attention_target(head_size, block_size)
        except NotBuilt as error:
            return str(error)
    return reason


def _not_hopper(device: Device) -> str | None:
    found = getattr(device, "compute_capability", None)
    if str(found) == _HOPPER:
        return None
    has = "" if found is None else f" has compute capability {found} and"
    return f"{device.device_kind}{has} is no Hopper GPU (9.0), for which the kernel is written"
