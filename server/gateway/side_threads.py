"""Runs expensive work on threads instead of the event loop: large requests and responses, and grammars.

Because of the GIL a thread alone does not keep the event loop responsive: no single call of a C function may
take long either (`http/bodies/json_text.py` ensures that for request bodies). The owners of the work take
turns (lanes.py).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import weight_in_bytes
from orca_jax.service.prepared_params import OutputRules
from server.gateway.lanes import Lane
from server.gateway.served_model import ServedModel

T = TypeVar("T")

LONG = 8_000  # bytes, characters or tokens: more takes over 1 to 2 ms, too long for the event loop
_VERY_LONG = 128_000  # larger work has another thread, so that shorter work does not wait for it
_MOST_BYTES = 128 << 20  # of a lane; one owner has half of it
_MOST_GRAMMARS = 32  # requests whose grammars wait to be compiled or are being compiled
_GRAMMAR_THREADS = 4  # only for grammars: compiling one may take seconds, and nothing else should wait for it
_HELD_PER_BYTE = 8  # roughly: bytes of memory that parameters take per byte of the request


# One set per process, which has one server: because of the GIL, more threads would not run at the same time.
_LONG = Lane("long", threads=1, most_waiting=512, most_bytes=_MOST_BYTES)
_LONGEST = Lane("longest", threads=1, most_waiting=64, most_bytes=_MOST_BYTES)
_RESPONSES = Lane("responses", threads=2)


def n_very_long() -> int:
    """The number of very long requests processed so far."""
    return _LONGEST.n_done


async def run_for_request(n_bytes: int, work: Callable[[], T]) -> T:
    """Process what a request sent, before it is accepted: inline if short, on a thread if long.

    Raises QueueFull if too much such work is waiting.
    """
    if n_bytes <= LONG:
        return work()
    return await (_LONG if n_bytes <= _VERY_LONG else _LONGEST).run(n_bytes, work)


async def run_for_response(n_characters: int, work: Callable[[], T]) -> T:
    """Process part of a response: inline if short, on a thread if long.

    Never refused: the number of live requests bounds this work.
    """
    if n_characters <= LONG:
        return work()
    return await _RESPONSES.run(n_characters, work)


class RuleCompiler:
    """Turns sampling parameters into output rules. Use it only on the server's event loop."""

    def __init__(self) -> None:
        self._lane = Lane(
            "rules",
            threads=_GRAMMAR_THREADS,
            most_waiting=_MOST_GRAMMARS,
            what="grammars",
            meter=time.monotonic,  # compilation has a thread of its own, and holds this one meanwhile
        )

    async def rules(
        self,
        model: ServedModel,
        sampling: SamplingParams,
        form: OutputForm = PLAIN_TEXT,
        loose: OutputForm | None = None,
    ) -> OutputRules:
        """The rules for requests with these parameters; see `Orca.rules`. Raises QueueFull too."""
        make = partial(model.service.rules, sampling, form, loose)
        if sampling.grammar is None and form.lark is None:
            n_bytes = weight_in_bytes((), sampling) // _HELD_PER_BYTE
            return await run_for_request(n_bytes, make)
        return await self._lane.run(0, make)
