"""Sampling parameters become rules; the compilation of a grammar is no work for the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from orca_jax.errors import QueueFull
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.weight import weight_in_bytes
from orca_jax.service.prepared_params import OutputRules
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import reading

_MOST_WAITING = 16  # requests with grammars, those that are being compiled among them
_HELD_PER_BYTE = 8  # about: what parameters hold, of what they came in
_THREADS = 4  # of their own, so that nothing else waits for a grammar, which takes up to seconds


class RuleCompiler:
    """One for a server; on its event loop alone."""

    def __init__(self) -> None:
        self._n_waiting = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rules")

    async def rules(self, model: ServedModel, sampling: SamplingParams) -> OutputRules:
        """The rules for requests with these parameters. Raises a leaf of InvalidRequest, or QueueFull."""
        make = partial(model.service.rules, sampling)
        if sampling.grammar is None:
            came_in = weight_in_bytes((), sampling) // _HELD_PER_BYTE
            return await reading(came_in, make)
        if self._n_waiting >= _MOST_WAITING:
            raise QueueFull(f"{_MOST_WAITING} grammars wait to be compiled, as many as may; try again later")
        self._n_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        finally:
            self._n_waiting -= 1
