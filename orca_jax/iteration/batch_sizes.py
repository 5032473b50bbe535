"""Lays a control message out as a flat batch: chooses the bucket and the layout of an iteration."""

from dataclasses import dataclass, replace

from orca_jax.iteration.buckets import bucket_for
from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, flat_batch
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.shape import EngineShape


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The layouts of an engine.

    `buckets` ascend: those of the shape, or fewer whose last holds every batch. A deterministic engine has
    two, the smaller for decodes and the larger for prefills, and uses the same sampler for a sampled row
    whatever the other rows need.
    """

    shape: EngineShape
    buckets: tuple[int, ...]

    @property
    def layouts(self) -> list[FlatLayout]:
        """One layout per bucket."""
        shape = self.shape
        return [FlatLayout(n, min(n, shape.max_rows), shape.max_blocks) for n in self.buckets]

    def lay_out(self, message: ControlMessage) -> FlatBatch:
        """Lay out an iteration in the smallest bucket that holds it, or if deterministic in its phase's."""
        shape = self.shape
        bucket = bucket_for(message.token_ids.shape[0], self.buckets)
        if shape.deterministic and message.initiation.any():
            assert message.initiation.all(), "a deterministic engine never mixes phases"
            bucket = self.buckets[-1]
        flat = flat_batch(
            message,
            bucket=bucket,
            max_bs=shape.max_rows,
            block_size=shape.block_size,
            n_slots=shape.n_slots,
            n_rows=shape.n_rows,
        )
        if shape.deterministic and flat.programs.sampler != "greedy":
            flat = replace(flat, programs=replace(flat.programs, sampler="full"))
        return flat


def batch_sizes(shape: EngineShape) -> BatchSizes:
    """The batch sizes of an engine of this shape, with all its buckets."""
    return BatchSizes(shape, shape.buckets)
