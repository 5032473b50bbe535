# pyright: standard
"""Moves an array from any devices to any others in pieces of bounded size, never whole through one device.

`jax.device_put` between meshes gathers: an array goes whole through host memory to devices that it is not on,
and on the same devices in another order XLA may gather it whole on each. Here a shard of the result is made
of the parts of the source's shards that overlap it, one piece at a time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

PIECE_BYTES = 64 << 20

Box = tuple[tuple[int, int], ...]  # first and end along each axis
Part = tuple[Box, Box]  # a box of the result, and the equally large one of the source


def moved(
    value: jax.Array | np.ndarray,
    place: Sharding,
    dtype: Any,
    *,
    shape: Sequence[int] | None = None,
    parts: Sequence[Part] | None = None,
    without: int | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> jax.Array:
    """A copy of `value` in `dtype` at `place`, which shares no memory with it.

    Beside the result there are at most two pieces of `piece_bytes` (at least an element) at a time: one cut
    from a shard of `value`, and its copy on the device that it goes to. A shard that both places have goes
    over directly. All devices must be of this process.

    With `shape` the result has this shape, and its `parts` are copies of parts of `value`, by default one at
    the beginning of all axes; the rest is zeros. The result lacks the axis `without`, which has one index in
    all parts. The programs that cut and paste are compiled once for each
    device and pair of shapes, so the next arrays of the same shapes and places compile nothing.
    """
    shape = tuple(value.shape if shape is None else shape)
    if parts is None:
        common = tuple((0, min(sizes)) for sizes in zip(shape, value.shape, strict=True))
        parts = [(common, common)]
    sources = _shards(value)
    shards: list[jax.Array] = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        assert index is not None
        box = _box(index, shape)
        if without is not None:
            box = (*box[:without], (0, 1), *box[without:])
        shards.append(_shard(sources, parts, device, box, without, jnp.dtype(dtype), piece_bytes))
    return jax.make_array_from_single_device_arrays(shape, place, shards)


def _shards(value: jax.Array | np.ndarray) -> Mapping[Box, Mapping[Any, Any]]:
    """The parts of an array, which do not overlap, each with its copies by device (None: host memory)."""
    if isinstance(value, np.ndarray):
        return {tuple((0, n) for n in value.shape): {None: value}}
    parts: dict[Box, dict[Any, Any]] = {}
    for shard in value.addressable_shards:
        parts.setdefault(_box(shard.index, value.shape), {})[shard.device] = shard.data
    return parts


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def _shard(
    sources: Mapping[Box, Mapping[Any, Any]],
    parts: Sequence[Part],
    device: Any,
    box: Box,
    without: int | None,
    dtype: jnp.dtype,
    piece_bytes: int,
) -> jax.Array:
    """The part `box` of the result, on its device."""
    out: jax.Array | None = None

    def kept(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(n for axis, n in enumerate(numbers) if axis != without)

    for target, source in _overlaps(sources, parts, box):
        copies = sources[source.shard]
        data = copies[device] if device in copies else next(iter(copies.values()))
        if (
            target == box
            and without is None
            and source.box == source.shard
            and isinstance(data, jax.Array)
            and data.dtype == dtype
        ):
            return jax.block_until_ready(jax.device_put(data, device, may_alias=False))
        for piece in pieces(target, max(dtype.itemsize, data.dtype.itemsize), piece_bytes):
            first, begin = _offsets(source.box, source.shard), _offsets(piece, target)
            first = [a + b for a, b in zip(first, begin, strict=True)]
            cut = _cut(data, first, _sizes(piece), kept(_sizes(piece)), dtype)
            if device not in copies:
                cut = jax.block_until_ready(jax.device_put(cut, device, may_alias=False))
            if piece == box:
                return jax.block_until_ready(cut)
            if out is None:
                out = jnp.zeros(kept(_sizes(box)), dtype, device=device)
            # Waits, since the next piece may only be cut when this one is gone.
            out = jax.block_until_ready(_pasted(out, cut, np.array(kept(_offsets(piece, box)), np.int32)))
            del cut
    if out is None:  # nothing but zeros
        out = jnp.zeros(kept(_sizes(box)), dtype, device=device)
    return jax.block_until_ready(out)


class _Source(NamedTuple):
    """A box of the source, within one of its shards."""

    shard: Box
    box: Box


def _overlaps(shards: Iterable[Box], parts: Sequence[Part], box: Box) -> Iterator[tuple[Box, _Source]]:
    """Where the boxes of the result that lie in `box` come from."""
    for target, source in parts:
        moved_by = [a - b for (a, _), (b, _) in zip(source, target, strict=True)]
        wanted = _shifted(_common(target, box), moved_by)
        for shard in shards:
            found = _common(wanted, shard)
            if all(first < end for first, end in found):
                yield _shifted(found, [-n for n in moved_by]), _Source(shard, found)


def _common(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return tuple((a + n, b + n) for (a, b), n in zip(box, by, strict=True))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(end - first for first, end in box)


def _offsets(box: Box, to: Box) -> list[int]:
    return [a - b for (a, _), (b, _) in zip(box, to, strict=True)]


def pieces(box: Box, itemsize: int, n_bytes: int) -> Iterator[Box]:
    """Divide a box into boxes of at most `n_bytes`, or of one element, in order."""
    sizes = _sizes(box)
    for axis in range(len(box)):
        row_bytes = itemsize * math.prod(sizes[axis + 1 :])
        if row_bytes <= n_bytes or axis == len(box) - 1:
            step = max(1, n_bytes // row_bytes)
            break
    else:  # a number without axes
        yield box
        return
    # Axes before this one are taken an index at a time.
    for at in np.ndindex(*sizes[:axis]):
        before = tuple((first + i, first + i + 1) for (first, _), i in zip(box, at, strict=False))
        first, end = box[axis]
        for start in range(first, end, step):
            yield (*before, (start, min(end, start + step)), *box[axis + 1 :])


def _cut(
    data: Any, first: Sequence[int], sizes: tuple[int, ...], shape: tuple[int, ...], dtype: jnp.dtype
) -> Any:
    """A copy, in `shape`, of a part of one device's array, or of an array in host memory."""
    if isinstance(data, np.ndarray):
        part = data[tuple(slice(a, a + n) for a, n in zip(first, sizes, strict=True))]
        return part.astype(dtype).reshape(shape)
    return _slice(data, np.array(first, np.int32), sizes=sizes, shape=shape, dtype=dtype)


@partial(jax.jit, static_argnames=("sizes", "shape", "dtype"))
def _slice(
    data: jax.Array, first: jax.Array, *, sizes: tuple[int, ...], shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:
    return jax.lax.dynamic_slice(data, list(first), sizes).reshape(shape).astype(dtype)


@partial(jax.jit, donate_argnums=0)
def _pasted(out: jax.Array, piece: jax.Array, starts: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(out, piece, list(starts))
