"""The Attention K/V manager: which blocks of slots, and which row, each request holds (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer. A block is `block_size` contiguous slots, the
unit of allocation. In Algorithm 1 a request gets all blocks for its `max_tokens` when it is admitted. With
reservation on demand it gets those of its prompt, and grows. With a prefix cache it may share its first
blocks with other requests. When it ends it returns all of them at once.
"""

from collections import Counter
from collections.abc import Sequence

from orca_jax.scheduling.beam_blocks import BeamBlocks
from orca_jax.scheduling.blocks import Blocks


class KVManager(Blocks):
    """The blocks of an engine's requests; see Blocks for the sizes. `beams` has those of beam searches.

    `copies` of blocks, (from, to), are to be made before the next iteration that is issued.

    Blocks of different `namespace`s, such as models, never have the same hash in the prefix cache, nor have
    those of engines with different `hash_seed`s.
    """

    def __init__(
        self,
        *,
        n_blocks: int,
        block_size: int,
        n_rows: int,
        max_blocks_per_row: int,
        max_encoder_blocks: int = 0,
        prefix_caching: bool = False,
        namespace: str = "",
    ) -> None:
        super().__init__(
            n_blocks=n_blocks,
            block_size=block_size,
            n_rows=n_rows,
            max_blocks_per_row=max_blocks_per_row,
            max_encoder_blocks=max_encoder_blocks,
            prefix_caching=prefix_caching,
        )
        self.namespace = namespace
        self.hash_seed = ""  # to be set before the first request
        self.copies: Sequence[tuple[int, int]] = ()
        self.beams = BeamBlocks(self)

    def n_released(self, rows: Sequence[int]) -> int:
        """How many blocks would be free after the release of these rows: those that no other request holds.

        A beam search is named by its request's row.
        """
        if self.prefixes is None and not self.beams:
            return sum(len(self.blocks_of(row)) for row in rows)
        holders = Counter(block for row in rows for block in self.beams.held(row).tolist())
        return sum(map(self.beams.promised, rows)) + self.n_freed(holders)

    def reserve(self, max_tokens: int, n_encoder: int = 0) -> int:
        """Allocate a row and blocks for `max_tokens` tokens and `n_encoder` of an encoder; returns the row.

        The scheduler has checked that they are free (Algorithm 1, line 25).
        """
        self.check(0, self.n_blocks_for(max_tokens))
        row = self.start_row()
        if n_encoder:
            n = self.n_blocks_for(n_encoder)
            assert n <= self.max_encoder_blocks, f"{n} blocks for an encoder, of {self.max_encoder_blocks}"
            self.allocate(row, 0, n)
            self.encoder_blocks[row] = n
        self.grow(row, max_tokens)
        return row

    def reserve_sharing(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Like `reserve`, for several requests: the tokens of each, and the cached blocks it begins with.

        Every cached block is held before anything is allocated, which may evict others.
        """
        rows = [self.start_row() for _ in wanted]
        for row, (_, shared) in zip(rows, wanted, strict=True):
            if shared:
                self.share(row, shared)
        for row, (n_tokens, _) in zip(rows, wanted, strict=True):
            self.grow(row, n_tokens)
        return rows

    def release(self, row: int) -> int:
        """Free the row and its blocks, for reuse at once (Algorithm 1, line 14).

        Returns how many blocks no row holds any more. Cached blocks stay until evicted, a request's last
        blocks first.
        """
        if row in self.beams:
            return self.beams.release(row)
        assert 0 <= row < self.n_rows and self.slots_of[row], f"row {row} is not reserved"
        n_released = self.free(self.blocks_of(row))
        self.end_row(row)
        return n_released
