"""Turns sampling parameters into output rules. Grammars compile on threads, off the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from orca_jax.errors import QueueFull
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import weight_in_bytes
from orca_jax.service.prepared_params import OutputRules
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request

_MOST_WAITING = 16  # requests whose grammars wait to be compiled or are being compiled
_HELD_PER_BYTE = 8  # roughly: bytes of memory that parameters take per byte of the request
_THREADS = 4  # only for grammars: compiling one may take seconds, and nothing else should wait for it


class RuleCompiler:
    """A server has one. Use it only on the server's event loop."""

    def __init__(self) -> None:
        self._n_waiting = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rules")

    async def rules(self, model: ServedModel, sampling: SamplingParams) -> OutputRules:
        """The rules for requests with these parameters. Raises a leaf of InvalidRequest, or QueueFull."""
        make = partial(model.service.rules, sampling)
        if sampling.grammar is None:
            n_bytes = weight_in_bytes((), sampling) // _HELD_PER_BYTE
            return await run_for_request(n_bytes, make)
        if self._n_waiting >= _MOST_WAITING:
            raise QueueFull(f"{_MOST_WAITING} grammars wait to be compiled, the limit; try again later")
        self._n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            self._n_waiting -= 1
