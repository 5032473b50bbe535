"""llama.cpp's server in the environment of the package xllamacpp, for bench.peers.llama_cpp.

The settings are those that llama.cpp advises for a CPU: as many threads as cores, each bound to a core, and
continuous batching. Its threads spin while they wait, so its figures count on a quiet machine only.
"""

# pyright: reportMissingImports=false
import platform
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import xllamacpp

from bench.peers.child import Play, Playing, serve


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """Start a server for the GGUF file `checkpoint`, with `max_batch_size` slots of `longest` tokens each."""
    cores, slots = flags["cores"], flags["max_batch_size"]
    params = xllamacpp.CommonParams()
    params.model.path = flags["checkpoint"]
    params.n_parallel, params.n_ctx = slots, slots * flags["longest"]
    params.cont_batching, params.cache_prompt, params.warmup = True, False, True
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = cores
        threads.strict_cpu = True
    params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, 0
    arguments = dict(flags["arguments"])
    for name, value in arguments.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)

    def play(playing: Playing) -> None:
        # This reference to the server also keeps it alive.
        raise AssertionError(f"traces go to {server.listening_address}")

    settings = {
        "n_parallel": slots,
        "n_ctx": params.n_ctx,
        "n_threads": cores,
        "strict_cpu": True,
        **arguments,
    }
    versions = f"xllamacpp {version('xllamacpp')}, Python {platform.python_version()}"
    return play, {"url": server.listening_address, "versions": versions, "flags": settings}


if __name__ == "__main__":
    serve(start)
