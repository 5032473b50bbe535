"""Cache kinds: what layers keep for a request, and how many blocks each kind takes.

A kind says how many blocks a request takes when it is admitted, and how many it can ever take. Reservations
(Algorithm 1, line 24) and admission on demand sum over `KINDS`, so a new kind is counted everywhere once it
is listed there. The K/V manager allocates the blocks: those of fixed number at the beginning of the
request's row of the block table, then those that grow.
"""

from typing import Protocol

from orca_jax.request.request import Request
from orca_jax.scheduling.beam_blocks import most_blocks


class CacheKind(Protocol):
    """The number of blocks that a request takes of one kind, with `fixed` all of them at admission."""

    fixed: bool

    def at_first(self, req: Request, block_size: int) -> int:
        """The blocks that a request takes when it is admitted on demand."""
        ...

    def most(self, req: Request, block_size: int) -> int:
        """The most blocks that the request can take until it ends."""
        ...


class PagedTokens:
    """Keys and values of the decoder's tokens. They grow with each token; beams share those of the prompt.

    Sliding-window layers use this kind too, and keep the blocks that have left their window.
    """

    fixed = False

    def at_first(self, req: Request, block_size: int) -> int:
        return -(-req.n_tokens // block_size)

    def most(self, req: Request, block_size: int) -> int:
        if req.kind.forks:
            return most_blocks(len(req.prompt_ids), req.max_tokens, req.kind.n_rows, block_size)
        return -(-req.max_tokens // block_size)


class EncoderInput:
    """Keys and values of the encoder's input, which cross attention reads, from admission to the end."""

    fixed = True

    def at_first(self, req: Request, block_size: int) -> int:
        return -(-len(req.encoder_ids) // block_size)

    most = at_first


KINDS: tuple[CacheKind, ...] = (EncoderInput(), PagedTokens())


def fixed_blocks(req: Request, block_size: int) -> int:
    """The blocks at the beginning of a request's row, which hold no tokens of the decoder."""
    return sum(kind.most(req, block_size) for kind in KINDS if kind.fixed)


def blocks_at_first(req: Request, block_size: int) -> int:
    """The blocks that a request takes when it is admitted on demand."""
    return sum(kind.at_first(req, block_size) for kind in KINDS)


def slots_to_reserve(req: Request, block_size: int) -> int:
    """Algorithm 1's `max_tokens` of a request in whole blocks: the most slots that it can take."""
    return sum(kind.most(req, block_size) for kind in KINDS) * block_size
