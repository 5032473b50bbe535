"""Cache kinds: what layers keep of a request, each with the rule by which it gets blocks.

A kind answers how many blocks a request takes when it is admitted, and how many it can ever take.
Reservations (Algorithm 1, line 24) and admission on demand sum over all kinds. The K/V manager allocates
them: a request's fixed blocks at the beginning of its row, then those that grow.
"""

from typing import Protocol

from orca_jax.request.request import Request
from orca_jax.scheduling.beam_blocks import most_blocks


class CacheKind(Protocol):
    """The rule of one kind."""

    def at_first(self, req: Request, block_size: int) -> int:
        """The blocks that a request takes when it is admitted on demand."""
        ...

    def most(self, req: Request, block_size: int) -> int:
        """The most blocks that it can take."""
        ...


class PagedTokens:
    """Keys and values of a decoder's tokens: they grow with each, and beams part after the prompt.

    Layers with a window have this kind too: the blocks that have left their window are kept.
    """

    def at_first(self, req: Request, block_size: int) -> int:
        return -(-req.n_tokens // block_size)

    def most(self, req: Request, block_size: int) -> int:
        if req.kind.forks:
            return most_blocks(len(req.prompt_ids), req.max_tokens, req.kind.n_rows, block_size)
        return -(-req.max_tokens // block_size)


class EncoderInput:
    """Keys and values of an encoder's input, which cross attention reads: all from admission to the end."""

    def at_first(self, req: Request, block_size: int) -> int:
        return -(-len(req.encoder_ids) // block_size)

    most = at_first


KINDS: tuple[CacheKind, ...] = (EncoderInput(), PagedTokens())


def blocks_at_first(req: Request, block_size: int) -> int:
    """The blocks that a request takes when it is admitted on demand."""
    return sum(kind.at_first(req, block_size) for kind in KINDS)


def slots_to_reserve(req: Request, block_size: int) -> int:
    """What Algorithm 1 calls `max_tokens`, in whole blocks: the most slots that the request can take."""
    return sum(kind.most(req, block_size) for kind in KINDS) * block_size
