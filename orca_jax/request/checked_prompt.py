"""A prompt that has been checked."""

from dataclasses import dataclass

from orca_jax.request.pooling import Pooling


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that admission accepted, together with up to `n_output` output tokens.

    With an encoder, `encoder_ids` is the prompt and `token_ids` the decoder's. `given_ids` are the output
    tokens, if they are given and not sampled. The service adds how its requests are scheduled; see `Request`,
    also for `pooling`.
    """

    token_ids: tuple[int, ...]
    n_output: int
    encoder_ids: tuple[int, ...] = ()
    given_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None
    priority: int = 0
    cache_salt: tuple[str, ...] = ()
    block_hashes: tuple[bytes, ...] | None = None

    @property
    def n_input(self) -> int:
        """Tokens of what the user sent; with an encoder, of its input."""
        return len(self.encoder_ids or self.token_ids)
