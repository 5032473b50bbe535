"""Blocks that travel: a stage's part of the host tier, and the programs that copy blocks out and in.

States of recurrent layers travel by the same programs, one state of all layers as one block.

Out: a program gathers some blocks of all layers into one packed array for each kind of array, which the
host copies to its memory. In: the host's arrays go to the devices, and a program scatters them into the
caches. Both are compiled for a few numbers of blocks. They run in order with the iterations, and the host
waits for neither, except to bound the bytes on their way.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from orca_jax.errors import ConfigError
from orca_jax.execution.prefault import Prefault
from orca_jax.execution.programs import Program, ToCompile
from orca_jax.model.kv_cache import LayerCache, LayerState
from orca_jax.sharding.device_group import DeviceGroup
from orca_jax.sharding.specs import CACHE_SPEC

_CHUNK_BYTES = 16 << 20  # of the blocks that one call copies, so that those in flight take little memory
_MOST_BLOCKS = 64  # that one call copies
_IN_FLIGHT = 2  # calls in each direction; the host waits before there are more

_Memory = LayerCache | LayerState  # what a layer keeps, of which one index is a block or a state
_M = TypeVar("_M", LayerCache, LayerState)

# A kind of array in the caches: its shape after the first axis, which counts blocks, and its dtype.
_Kind = tuple[tuple[int, ...], np.dtype[Any]]
_PACKED_SPEC = PartitionSpec(None, None, *CACHE_SPEC[1:])  # [n, arrays of the kind, K, ...]


class _Leaving(NamedTuple):
    """Blocks on their way out, which the iteration of this number, from 1, listed."""

    iteration: int
    places: npt.NDArray[np.int32]
    packed: list[jax.Array]


class HostBlocks:
    """Room for `n_places` blocks of a stage's `caches` in the host's memory.

    `caches` may be jax.ShapeDtypeStructs. Pages of the host's memory are faulted in ahead of their first
    write.
    """

    def __init__(self, n_places: int, n_blocks: int, caches: Sequence[_Memory], group: DeviceGroup) -> None:
        self._n_places, self._n_blocks = n_places, n_blocks
        self._kinds = _by_kind(caches)
        self._place, self._packed_place = group.place(), group.place(_PACKED_SPEC)
        self.block_bytes = sum(_bytes_of(kind) * len(at) for kind, at in self._kinds.items())
        most = max(1, min(_MOST_BLOCKS, n_blocks, n_places, _CHUNK_BYTES // max(1, self.block_bytes)))
        self.buckets = tuple(sorted({1, min(8, most), min(32, most), most}))
        self._gather = Program(jax.jit(_gather, out_shardings=self._packed_place), key=_n_ids)
        scatter = jax.jit(
            partial(_scatter, kinds=tuple(tuple(at) for at in self._kinds.values())),
            donate_argnums=0,
            out_shardings=(group.place(CACHE_SPEC), self._place),
        )
        self._scatter = Program(scatter, key=_n_ids)
        # [n_places, arrays of the kind, K, B, D] of each kind; None while it is released
        self._memory: list[npt.NDArray[Any]] | None = None
        self._prefault: Prefault | None = None
        self._leaving: deque[_Leaving] = deque()
        self._n_begun = 0
        self._entering: deque[jax.Array] = deque()

    def renew(self) -> None:
        """Take the memory, empty. Raises ConfigError if the system has not enough."""
        self.release()
        try:
            self._memory = [
                np.empty((self._n_places, len(at), *shape), dtype)
                for (shape, dtype), at in self._kinds.items()
            ]
        except MemoryError as error:
            raise ConfigError(
                f"kv_host_bytes asks for {self._n_places * self.block_bytes} bytes for the keys and values "
                "of a stage's layers, and the system does not give them; lower it"
            ) from error
        if self._memory:  # a stage may have no layer of this kind
            self._prefault = Prefault(self._memory)

    def release(self) -> None:
        """Give the memory back; what it has is lost."""
        if self._prefault is not None:
            self._prefault.close()
            self._prefault = None
        self._memory = None
        self._leaving.clear()
        self._entering.clear()

    def copy_out(self, caches: Sequence[_Memory], copies: npt.NDArray[np.int32]) -> None:
        """Start copying blocks to places in the host's memory: copies [n, 2], block and place."""
        for chunk, ids in self._chunks(copies, copies[:, 0]):
            packed = self._gather(jax.tree.leaves(list(caches)), ids)
            for array in packed:
                array.copy_to_host_async()
            self._leaving.append(_Leaving(self._n_begun, chunk[:, 1], packed))
            self._reach(int(chunk[:, 1].max()))
            self._settle(_IN_FLIGHT)

    def copy_in(self, caches: Sequence[_M], copies: npt.NDArray[np.int32]) -> list[_M]:
        """Start copying places of the host's memory to blocks: copies [n, 2], place and block."""
        needed = [i for i, one in enumerate(self._leaving) if np.isin(one.places, copies[:, 0]).any()]
        if needed:
            self._settle(len(self._leaving) - 1 - needed[-1])
        leaves, tree = jax.tree.flatten(list(caches))
        for chunk, ids in self._chunks(copies, copies[:, 1]):
            packed: list[Any] = []
            for memory in self._held:
                array = np.empty((len(ids), *memory.shape[1:]), memory.dtype)
                np.take(
                    memory, chunk[:, 0], axis=0, out=array[: len(chunk)], mode="clip"
                )  # "raise" copies twice
                packed.append(array)
            leaves, done = self._scatter(leaves, ids, jax.device_put(packed, self._packed_place))
            self._entering.append(done)
            if len(self._entering) > _IN_FLIGHT:
                self._entering.popleft().block_until_ready()
        return jax.tree.unflatten(tree, leaves)

    @property
    def kinds(self) -> list[tuple[_Kind, int]]:
        """The kinds of arrays of a block, in the order of its bytes, and how many there are of each."""
        return [(kind, len(at)) for kind, at in self._kinds.items()]

    def gathered(self, caches: Sequence[_Memory], block: int) -> list[bytes]:
        """A block's bytes, from the devices. Raises ValueError if the caches are released."""
        if self._memory is None:
            raise ValueError("the caches are released")
        ids = jax.device_put(np.array([block], np.int32), self._place)
        packed = self._gather(jax.tree.leaves(list(caches)), ids)
        return [np.asarray(array)[0].tobytes() for array in packed]

    def pack(self, caches: Sequence[_Memory], blocks: Sequence[int]) -> list[list[Any]]:
        """Start gathering blocks: for each chunk of `buckets[-1]` blocks, an array [n, ...] of each kind."""
        ids = np.asarray(blocks, np.int32)
        chunks: list[list[Any]] = []
        for _, padded in self._chunks(ids, ids):
            packed = self._gather(jax.tree.leaves(list(caches)), padded)
            for array in packed:
                array.copy_to_host_async()
            chunks.append(packed)
            if len(chunks) > _IN_FLIGHT:
                chunks[-_IN_FLIGHT - 1] = [np.asarray(array) for array in chunks[-_IN_FLIGHT - 1]]
        return chunks

    def views(self, place: int) -> list[memoryview]:
        """The memory of a block in the host's memory, for each kind. Raises ValueError if it is released."""
        held = self._held
        self._reach(place)
        return [_view(memory[place]) for memory in held]

    def begin(self) -> None:
        """Begin an iteration's copies."""
        self._n_begun += 1
        self.settle()

    @property
    def n_done(self) -> int:
        """Iterations whose copies are all made."""
        self.settle()
        return self._leaving[0].iteration - 1 if self._leaving else self._n_begun

    def get(self, place: int) -> list[bytes]:
        """A copy of a block in the host's memory."""
        return [memory[place].tobytes() for memory in self._held]

    def put(self, place: int, data: memoryview) -> None:
        """Write a block of `block_bytes` bytes to the host's memory. Raises ValueError if it is released."""
        held = self._held
        self._reach(place)
        for memory in held:
            n = memory[place].nbytes
            memory[place] = np.frombuffer(data[:n], memory.dtype).reshape(memory.shape[1:])
            data = data[n:]

    def settle(self) -> None:
        """Copy to the host's memory what the devices have gathered by now."""
        # jax's stub lacks `is_ready`.
        while self._leaving and all(
            array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
            for array in self._leaving[0].packed
        ):
            self._settle(len(self._leaving) - 1)

    def programs(self, caches: Sequence[_Memory], what: str) -> Iterator[ToCompile]:
        """The programs for caches like these, jax.ShapeDtypeStructs with their shardings; `what` travels."""
        leaves = jax.tree.leaves(list(caches))
        for n in self.buckets:
            ids = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=self._place)
            packed = [
                jax.ShapeDtypeStruct((n, len(at), *shape), dtype, sharding=self._packed_place)
                for (shape, dtype), at in self._kinds.items()
            ]
            yield ToCompile(f"copies of {n} {what} to the host", partial(self._gather.compile, leaves, ids))
            yield ToCompile(
                f"copies of {n} {what} from the host", partial(self._scatter.compile, leaves, ids, packed)
            )

    @property
    def _held(self) -> list[npt.NDArray[Any]]:
        if self._memory is None:
            raise ValueError("the memory is released")
        return self._memory

    def _reach(self, place: int) -> None:
        if self._prefault is not None:
            self._prefault.reach(place)

    def _settle(self, n: int) -> None:
        """Wait until at most `n` calls' blocks are on their way out."""
        while len(self._leaving) > n:
            _, places, packed = self._leaving.popleft()
            for memory, array in zip(self._held, packed, strict=True):
                memory[places] = np.asarray(array)[: len(places)]

    def _chunks(
        self, copies: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]
    ) -> Iterator[tuple[npt.NDArray[np.int32], jax.Array]]:
        """Parts of the copies, and the blocks of each, padded to a bucket by different ones out of range."""
        most, start = self.buckets[-1], 0
        while start < len(copies):
            chunk = copies[start : start + most]
            n = next(size for size in self.buckets if size >= len(chunk))
            ids = np.arange(self._n_blocks, self._n_blocks + n, dtype=np.int32)
            ids[: len(chunk)] = blocks[start : start + most]
            yield chunk, jax.device_put(ids, self._place)
            start += most


def _by_kind(caches: Sequence[_Memory]) -> dict[_Kind, list[int]]:
    """The indices of the caches' arrays, by their kind."""
    kinds: dict[_Kind, list[int]] = {}
    for i, array in enumerate(jax.tree.leaves(list(caches))):
        kinds.setdefault((tuple(array.shape[1:]), np.dtype(array.dtype)), []).append(i)
    return kinds


def _bytes_of(kind: _Kind) -> int:
    shape, dtype = kind
    return int(np.prod(shape)) * dtype.itemsize


def _n_ids(arrays: Sequence[jax.Array], ids: jax.Array, *_: Any) -> int:
    return ids.shape[0]


def _gather(arrays: Sequence[jax.Array], ids: jax.Array) -> list[jax.Array]:
    """Pack blocks [n] of all arrays: for each kind, [n, arrays of the kind, ...]."""
    kinds: dict[_Kind, list[jax.Array]] = {}
    for array in arrays:
        kinds.setdefault((tuple(array.shape[1:]), array.dtype), []).append(array.at[ids].get(mode="clip"))
    return [jnp.stack(each, axis=1) for each in kinds.values()]


def _scatter(
    arrays: Sequence[jax.Array],
    ids: jax.Array,
    packed: Sequence[jax.Array],
    *,
    kinds: Sequence[Sequence[int]],
) -> tuple[list[jax.Array], jax.Array]:
    """Unpack blocks [n] into all arrays; those out of range are dropped. Also returns what to wait for."""
    into = list(arrays)
    for at, each in zip(kinds, packed, strict=True):
        for j, i in enumerate(at):
            into[i] = into[i].at[ids].set(each[:, j], mode="drop", unique_indices=True)
    return into, ids + 1


def _view(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


class StagesMemory:
    """The host tier's memory of all stages in this process (scheduling/disk_tier.py's HostMemory)."""

    def __init__(self, stages: Sequence[HostBlocks]) -> None:
        self._stages = stages
        self.block_bytes = sum(stage.block_bytes for stage in stages)

    @property
    def n_done(self) -> int:
        return min(stage.n_done for stage in self._stages)

    def get(self, place: int) -> list[bytes]:
        return [part for stage in self._stages for part in stage.get(place)]

    def put(self, place: int, data: bytes) -> None:
        if len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes came for a block of {self.block_bytes}")
        rest = memoryview(data)
        for stage in self._stages:
            stage.put(place, rest[: stage.block_bytes])
            rest = rest[stage.block_bytes :]

    def views(self, place: int) -> list[memoryview]:
        """The memory of a block, in the order of `kinds`, for another thread to write to."""
        found = [stage.views(place) for stage in self._stages]
        return [found[stage][at] for _, parts in self._order() for stage, at in parts]

    @property
    def kinds(self) -> list[tuple[_Kind, int]]:
        """The kinds of arrays of a block over all stages, which are the same however layers are split."""
        counts = [[n for _, n in stage.kinds] for stage in self._stages]
        return [(kind, sum(counts[stage][at] for stage, at in parts)) for kind, parts in self._order()]

    def pack(self, blocks: Sequence[int], caches: Sequence[Sequence[_Memory]]) -> "PackedStages":
        """Start gathering blocks from each stage's `caches`."""
        chunks = [stage.pack(each, blocks) for stage, each in zip(self._stages, caches, strict=True)]
        sizes = [stage.buckets[-1] for stage in self._stages]
        return PackedStages(chunks, sizes, [parts for _, parts in self._order()])

    def _order(self) -> list[tuple[_Kind, list[tuple[int, int]]]]:
        """The kinds in the order of layers, and of each its places: stage, and index in the stage's kinds."""
        found: dict[_Kind, list[tuple[int, int]]] = {}
        for i, stage in enumerate(self._stages):
            for at, (kind, _) in enumerate(stage.kinds):
                found.setdefault(kind, []).append((i, at))
        return [*found.items()]


class PackedStages:
    """Blocks gathered from all stages (scheduling/leases.py's PackedBlocks)."""

    def __init__(
        self,
        chunks: Sequence[list[list[Any]]],
        sizes: Sequence[int],
        order: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        self._chunks, self._sizes, self._order = chunks, sizes, order
        self._lock = threading.Lock()
        self._settled = False

    def settle(self) -> None:
        """Wait until the blocks are in host memory, and free their memory on the devices."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
            for stage in self._chunks:
                stage[:] = [[np.asarray(array) for array in packed] for packed in stage]

    def parts(self, index: int) -> list[memoryview]:
        """The bytes of a block, as in `StagesMemory.views`."""
        self.settle()
        found: list[memoryview] = []
        for parts in self._order:
            for stage, at in parts:
                chunk, i = divmod(index, self._sizes[stage])
                found.append(_view(self._chunks[stage][chunk][at][i]))
        return found


class PackedPrompt:
    """The `n_blocks` blocks of a prompt, and the state after them, if its model has one."""

    def __init__(self, blocks: PackedStages, n_blocks: int, state: PackedStages | None = None) -> None:
        self._blocks, self._n_blocks, self._state = blocks, n_blocks, state

    def settle(self) -> None:
        """Wait until all is in host memory, and free its memory on the devices."""
        self._blocks.settle()
        if self._state is not None:
            self._state.settle()

    def parts(self, index: int) -> list[memoryview]:
        """The bytes of a block, or of the state after the last one."""
        if index < self._n_blocks:
            return self._blocks.parts(index)
        assert self._state is not None
        return self._state.parts(index - self._n_blocks)
