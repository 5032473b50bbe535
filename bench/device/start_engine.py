"""Times one start of the engine without the server, for `bench.start --engine`; the last line is JSON.

    python -m bench.device.start_engine PRESET FOLDER

Weights are random. Every program that an iteration may need is compiled, or read from FOLDER.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from contextlib import closing

from bench.device.bare_engine import BareEngine
from orca_jax.config import Sizes
from orca_jax.execution.compile_counter import CompileCounter
from orca_jax.families.presets import PRESETS
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams

_EVERY_SECONDS = 10.0


class CompileProgress:
    """Records when compiling began, and prints its progress now and then."""

    def __init__(self) -> None:
        self.begun: float | None = None
        self.programs = 0
        self._next = 0.0

    def __call__(self, done: int, total: int, name: str) -> None:
        """See programs.OnProgram."""
        now = time.monotonic()
        self.begun, self.programs = self.begun or now, total
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            print(f"{now - self.begun:.0f} s: {done} of {total} programs; {name}", flush=True)


def main() -> None:
    """Start, run one request of two tokens, and print the time of each."""
    parser = argparse.ArgumentParser(prog="python -m bench.device.start_engine", description=__doc__)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder", help="folder for compiled programs")
    flags = parser.parse_args()
    model, progress = PRESETS[flags.preset], CompileProgress()
    begin = time.monotonic()
    with closing(CompileCounter()) as counter:
        engine = BareEngine(
            model, Sizes(), compile_ahead=True, compile_cache=flags.folder, on_program=progress
        )
        ready = time.monotonic()
        seconds = _seconds(lambda: engine.run([_request(model.vocab_size)]))
        counts = counter.counts()
    assert progress.begun is not None, "there are programs to compile"
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "load": progress.begun - begin,
                "compile": ready - progress.begun,
                "cpu": used.ru_utime + used.ru_stime,
                "programs": progress.programs,
                "compiles": counts.programs,
                "from_disk": counts.from_disk,
                "first_request": seconds,
            }
        ),
        flush=True,
    )


def _request(vocab_size: int) -> Request:
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    return Request("0", tuple(i % vocab_size for i in range(20)), 22, sampling, seed=0)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
