"""From a control message to its flat batch: which bucket an iteration is padded to, and with what layout."""

from dataclasses import dataclass, replace

from orca_jax.iteration.buckets import bucket_for
from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, flat_batch
from orca_jax.iteration.message import ControlMessage
from orca_jax.iteration.shape import EngineShape


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The layouts of an engine. `buckets` are those of its shape, or fewer that ascend and hold every batch.

    A deterministic engine has two buckets, the smaller for decodes and the larger for prefills, and a sampled
    row has the same sampler whatever its neighbours need.
    """

    shape: EngineShape
    buckets: tuple[int, ...]

    @property
    def layouts(self) -> list[FlatLayout]:
        """One for each bucket."""
        shape = self.shape
        return [FlatLayout(n, min(n, shape.max_rows), shape.max_blocks) for n in self.buckets]

    def lay_out(self, message: ControlMessage) -> FlatBatch:
        """The batch of an iteration, in the smallest bucket that holds it, or in its phase's."""
        shape = self.shape
        bucket = bucket_for(message.token_ids.shape[0], self.buckets)
        if shape.deterministic and message.initiation.any():
            assert message.initiation.all(), "the phases run in turn"
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
    """Those of an engine of this shape."""
    return BatchSizes(shape, shape.buckets)
