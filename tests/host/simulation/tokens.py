"""The tokens of simulated devices: each depends on all earlier tokens, the seed and the number of stages."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orca_jax.errors import OutputFailed
from orca_jax.grammar.token_mask import words_of

_PRIME = 1_000_003


def prefix_digest(digest: int, token_id: int) -> int:
    """The cache entry of a token, which depends on all tokens up to it."""
    return (digest * 131 + token_id + 1) % _PRIME


def through_stage(hidden: int, digest: int) -> int:
    """A stage's output from its input hidden state and its cache entry."""
    return (hidden * 31 + digest) % _PRIME


def token_of(hidden: int, seed: int, index: int, vocab_size: int) -> int:
    """The token that the last stage samples."""
    return (hidden + seed * 31 + index * 7919) % vocab_size


def _is_allowed(token_id: int, digest: int) -> bool:
    """Whether a SimulatedConstraint allows a token after a prefix; it allows two of three tokens."""
    return (token_id + digest) % 3 != 0


class SimulatedConstraint:
    """A request.OutputConstraint that acts on every other token and depends on all earlier tokens."""

    failure: str | None = None
    failure_kind = OutputFailed

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.n_followed = 0

    def acts(self, n_output: int) -> bool:
        """Whether it restricts this token: the first, the third, ..."""
        return n_output % 2 == 0

    def allowed(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], into: npt.NDArray[np.int32]
    ) -> None:
        """Write the mask of allowed tokens."""
        digest = _digest((*prompt_ids, *output_ids))
        into[:] = words_of([t for t in range(self._vocab_size) if _is_allowed(t, digest)], self._vocab_size)

    def drafts(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], drafts: Sequence[int], n: int
    ) -> Sequence[int]:
        """All drafts."""
        self.n_followed = len(drafts)
        return drafts

    def allowed_after(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        drafts: Sequence[int],
        into: npt.NDArray[np.int32],
    ) -> None:
        """Write the mask after each draft."""
        for i, mask in enumerate(into):
            self.allowed(prompt_ids, [*output_ids, *drafts[: i + 1]], mask)

    def accept(self, token_id: int) -> bool:
        """Never ends the output."""
        return False


def _digest(token_ids: Sequence[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = prefix_digest(digest, token_id)
    return digest


def undisturbed_tokens(
    prompt_ids: Sequence[int],
    seed: int,
    n_output: int,
    *,
    n_stages: int,
    vocab_size: int,
    constrained: bool = False,
) -> list[int]:
    """The tokens that a request gets without faults; `constrained` by a SimulatedConstraint."""
    digest = _digest(prompt_ids)
    tokens: list[int] = []
    for index in range(n_output):
        hidden = 0
        for _ in range(n_stages):
            hidden = through_stage(hidden, digest)
        token_id = token_of(hidden, seed, index, vocab_size)
        while constrained and index % 2 == 0 and not _is_allowed(token_id, digest):
            token_id = (token_id + 1) % vocab_size
        tokens.append(token_id)
        digest = prefix_digest(digest, tokens[-1])
    return tokens
