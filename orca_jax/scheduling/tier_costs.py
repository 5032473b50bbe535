"""The choice between reading a prompt's blocks and computing them again, by the time that each takes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCosts:
    """Seconds of computing prompts, and of reading a block.

    A prompt's token takes `token` seconds, and `pair` more for each key that it attends to. A block takes
    `host` seconds from the host's memory to the devices, and `disk` or `peer` from further away, with the way
    from the host's memory. A state of recurrent layers takes as long as `state` blocks.
    """

    block_size: int
    token: float
    pair: float
    host: float = 0.0
    disk: float = 0.0
    peer: float = 0.0
    state: float = 0.0

    def pays(self, seconds: float, first: int, n: int) -> bool:
        """Whether reading `n` blocks after the `first` ones in so many seconds is quicker than computing."""
        before, n_tokens = first * self.block_size, n * self.block_size
        n_pairs = n_tokens * before + n_tokens * (n_tokens + 1) // 2
        return seconds < n_tokens * self.token + n_pairs * self.pair
