"""A chain of hashes of a prompt's beginning.

Each hash covers a step and, through the hash before it, all that precedes; so two prompts that begin alike
have chains that begin alike. A step of 64 bytes is about a block of the K/V cache, 16 tokens. Steps grow with
the prompt, so that 256 of them cover 340 KiB; what follows is not read.
"""

import hashlib
from collections.abc import Iterable

_STEP = 64  # bytes of the first steps
_GROWS_AFTER = 64  # steps; each such group's steps are four times as long as those of the group before
MOST_STEPS = 256


def step_hashes(root: bytes, pieces: Iterable[bytes], *, whole_steps: bool) -> tuple[int, ...]:
    """At most MOST_STEPS hashes of 64 bits, which with another `root` are all others.

    No step spans two pieces. What is left of a piece is a step too, unless there are only `whole_steps`.
    """
    digest = hashlib.blake2b(root, digest_size=8).digest()
    hashes = list[int]()
    for piece in pieces:
        start = 0
        while start < len(piece):
            if len(hashes) == MOST_STEPS:
                return tuple(hashes)
            end = start + _step(len(hashes))
            if whole_steps and end > len(piece):
                break
            digest = hashlib.blake2b(piece[start:end], digest_size=8, key=digest).digest()
            hashes.append(int.from_bytes(digest, "little"))
            start = end
    return tuple(hashes)


def covered_bytes(n_steps: int) -> int:
    """The most bytes of a prompt that its first `n_steps` cover."""
    groups, rest = divmod(n_steps, _GROWS_AFTER)
    return sum(_GROWS_AFTER * _step(_GROWS_AFTER * group) for group in range(groups)) + rest * _step(n_steps)


def _step(index: int) -> int:
    return _STEP << (2 * (index // _GROWS_AFTER))
