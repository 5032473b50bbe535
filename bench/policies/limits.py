"""The limits of the engine that plays a trace."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The longest request, in tokens, and the engine's sizes; `n_slots` None: as many as fit into memory."""

    n_positions: int
    max_batch_size: int
    n_slots: int | None = None
