"""Seconds of an iteration in each place that it passes: stage, link, stage, ... (ORCA 4.1).

`SimulatedEngine` calls it a million times, so it is fast: what an operation moves and computes is affine in
the sums over a batch (cost_model.IterationSums), and the coefficients are read off the cost model once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from bench.simulate.cluster import KERNEL_GAP, KERNELS_FIRST, KERNELS_LAST, KERNELS_PER_LAYER, Cluster
from orca_jax.config import Dtype, ParallelConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.cost_model import (
    Device,
    IterationSums,
    Operation,
    floor,
    operations,
)
from orca_jax.planning.device_traffic import hop_bytes, shared_bytes
from orca_jax.planning.stage_layers import check_split, stage_layers
from orca_jax.planning.stage_memory import ITEMSIZE

_ORIGIN = IterationSums(0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A model split into `n_stages`, each over `n_devices` (Table 1: inter- and intra-partitions)."""

    model: ModelConfig
    n_stages: int
    n_devices: int
    dtype: Dtype = "float16"

    def __post_init__(self) -> None:
        check_split(
            self.model, ParallelConfig(pipeline_parallel=self.n_stages, tensor_parallel=self.n_devices)
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights, activations, keys and values."""
        return ITEMSIZE[self.dtype]

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return stage_layers(self.model.n_layers, self.n_stages)

    def operations(self, sums: IterationSums, layers: range) -> list[Operation]:
        """The operations of one device of the stage with these layers."""
        size = self.itemsize
        return operations(
            self.model, sums, weight_bytes=size, kv_bytes=size, layers=layers, n_shards=self.n_devices
        )


@dataclass(frozen=True, slots=True)
class _Affine:
    """An operation's bytes and operations: a constant, and multiples of the four sums."""

    n_bytes: tuple[float, ...]
    n_flops: tuple[float, ...]

    def seconds(self, sums: IterationSums, device: Device) -> float:
        """The floor of one operation, as in cost_model.floor."""
        rows, tokens, keys, seen = sums
        c, r, t, k, s = self.n_bytes
        moved = (c + r * rows + t * tokens + k * keys + s * seen) / device.bandwidth
        c, r, t, k, s = self.n_flops
        computed = (c + r * rows + t * tokens + k * keys + s * seen) / device.matrix_rate
        return moved if moved > computed else computed


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage's layers; `in_order` picks its operations' times, in order, from those of the distinct ones.

    `latency` is in seconds: the time of collectives, kernels and control messages that does not depend on
    size.
    """

    layers: range
    in_order: Callable[[list[float]], tuple[float, ...]]
    latency: float


class Places:
    """The seconds in each place, for `SimulatedEngine`: stage 1, the link to stage 2, stage 2, ..."""

    def __init__(self, partition: Partition, cluster: Cluster) -> None:
        self.partition = partition
        self.cluster = cluster
        self._device = cluster.device.rates(partition.dtype)
        self._distinct: list[_Affine] = []  # across all stages: their layers are equal
        self._stages = [self._stage(i) for i in range(partition.n_stages)]

    def __call__(self, sums: IterationSums) -> list[float]:
        """The seconds of an iteration with these sums."""
        times = [operation.seconds(sums, self._device) for operation in self._distinct]
        return self._with_links(sums, [sum(stage.in_order(times)) for stage in self._stages])

    def plain(self, sums: IterationSums) -> list[float]:
        """The same without shortcuts, by cost_model.floor over all operations."""
        partition = self.partition
        floors = [floor(partition.operations(sums, layers), self._device) for layers in partition.stages]
        return self._with_links(sums, floors)

    def _with_links(self, sums: IterationSums, floors: Sequence[float]) -> list[float]:
        """The stages' floors, plus links and the time that does not depend on size."""
        partition, cluster = self.partition, self.cluster
        model, size, n_devices = partition.model, partition.itemsize, partition.n_devices
        hop = hop_bytes(model, sums, weight_bytes=size)
        ring_rate = cluster.ring_rate(n_devices)
        seconds: list[float] = []
        for i, stage in enumerate(self._stages):
            if i:
                link = cluster.hop_latency(i, n_devices) + hop / cluster.hop_rate(i, n_devices)
                seconds.append(cluster.slowness * link)
            shared = shared_bytes(model, sums, weight_bytes=size, layers=stage.layers, n_shards=n_devices)
            seconds.append(cluster.slowness * (floors[i] + shared / ring_rate + stage.latency))
        return seconds

    def _stage(self, index: int) -> _Stage:
        partition, cluster = self.partition, self.cluster
        layers = partition.stages[index]
        first, last = layers.start == 0, layers.stop == partition.model.n_layers
        # Two all-reduces per layer, one after the embedding, and the gathered logits (shared_bytes).
        latency = (2 * len(layers) + first + last) * cluster.ring_latency(partition.n_devices)
        n_kernels = KERNELS_PER_LAYER * len(layers) + KERNELS_FIRST * first + KERNELS_LAST * last
        latency += n_kernels * KERNEL_GAP
        if index and cluster.control_messages:
            latency += cluster.hop_latency(index, partition.n_devices)
        order: list[int] = []
        for operation in self._affine(layers):
            if operation not in self._distinct:
                self._distinct.append(operation)
            order.append(self._distinct.index(operation))
        return _Stage(layers, itemgetter(*order), latency)

    def _affine(self, layers: range) -> list[_Affine]:
        """Coefficients: an operation's figures where one sum is 1, minus those where all are 0."""
        origin = self.partition.operations(_ORIGIN, layers)
        units = [
            self.partition.operations(_ORIGIN._replace(**{name: 1}), layers) for name in IterationSums._fields
        ]
        return [
            _Affine(
                (start.n_bytes, *(one.n_bytes - start.n_bytes for one in ones)),
                (start.n_flops, *(one.n_flops - start.n_flops for one in ones)),
            )
            for start, *ones in zip(origin, *units, strict=True)
        ]
