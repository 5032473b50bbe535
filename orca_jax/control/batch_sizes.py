"""The sizes that an engine's batches are padded to, and with them a batch's layout."""

from dataclasses import dataclass, replace

from orca_jax.config import ServingConfig
from orca_jax.control.message_wire import ControlWire
from orca_jax.iteration.buckets import bucket_for, bucket_sizes
from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, flat_batch
from orca_jax.iteration.message import ControlMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """`buckets` ascend and hold every batch of up to `max_rows` requests; the rest is as in `flat_batch`.

    A `deterministic` engine has two: the smaller is for increments, the larger for initiations, and a sampled
    row has the same sampler whatever its neighbours need.
    """

    buckets: tuple[int, ...]
    max_rows: int
    max_blocks: int
    block_size: int
    n_slots: int
    n_rows: int
    deterministic: bool = False

    @property
    def layouts(self) -> list[FlatLayout]:
        """Each bucket's."""
        return [FlatLayout(n, min(n, self.max_rows), self.max_blocks) for n in self.buckets]

    def lay_out(self, message: ControlMessage) -> FlatBatch:
        """The batch of an iteration, in the smallest bucket that holds it, or in its phase's."""
        bucket = bucket_for(message.token_ids.shape[0], self.buckets)
        if self.deterministic and message.initiation.any():
            assert message.initiation.all(), "the phases run in turn"
            bucket = self.buckets[-1]
        flat = flat_batch(
            message,
            bucket=bucket,
            max_bs=self.max_rows,
            block_size=self.block_size,
            n_slots=self.n_slots,
            n_rows=self.n_rows,
        )
        if self.deterministic and flat.programs.sampler != "greedy":
            flat = replace(flat, programs=replace(flat.programs, sampler="full"))
        return flat


def batch_sizes(wire: ControlWire, buckets: tuple[int, ...] | None = None) -> BatchSizes:
    """Those of an engine with control messages of these sizes."""
    if buckets is None:
        buckets = buckets_of(
            wire.max_tokens, wire.max_rows, deterministic=wire.deterministic, coarse=wire.coarse_buckets
        )
    return BatchSizes(
        buckets=buckets,
        max_rows=wire.max_rows,
        max_blocks=wire.max_blocks,
        block_size=wire.block_size,
        n_slots=wire.n_blocks * wire.block_size,
        n_rows=wire.n_rows,
        deterministic=wire.deterministic,
    )


def buckets_of(
    max_tokens: int, max_rows: int, *, deterministic: bool, coarse: bool = False
) -> tuple[int, ...]:
    """The buckets of an engine whose batches have up to so many tokens and requests."""
    if deterministic:
        return tuple(sorted({max_rows, max_tokens}))
    return bucket_sizes(max_tokens, coarse=coarse)


def serving_buckets(serving: ServingConfig) -> tuple[int, ...]:
    """Those of an engine that serves so."""
    return buckets_of(
        serving.max_batch_tokens,
        serving.max_batch_size,
        deterministic=serving.deterministic,
        coarse=serving.coarse_buckets,
    )
