"""Tokens of a simulated engine that obey a request's constraints, as a device's do."""

from collections.abc import Callable

import numpy as np

from orca_jax.request.request import Request


def obedient(token: Callable[[Request, int], int], vocab_size: int) -> Callable[[Request, int], int]:
    """`token` if the request allows it, else the first allowed token."""

    def choose(request: Request, index: int) -> int:
        wanted, constraint = token(request, index), request.constraint
        if constraint is None or not constraint.acts(len(request.output_ids)):
            return wanted
        words = np.zeros(-(-vocab_size // 32), np.int32)
        constraint.allowed(request.prompt_ids, request.output_ids, words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
        return wanted if bits[wanted] else int(np.flatnonzero(bits)[0])

    return choose
