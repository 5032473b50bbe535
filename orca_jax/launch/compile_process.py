# pyright: standard
"""Compiles programs of a serving engine into the cache on disk, in a process of low priority.

    python -m orca_jax.launch.compile_process

`CompileProcess` starts it with a description of the engine as the first line of its stdin, and it answers
with a line for each bucket whose programs are on disk. It ends when its stdin closes.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from orca_jax.aot.compiled_stage import placed_parameters
from orca_jax.config import Attention, ParallelConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.worker import Worker, all_programs, stage_workers
from orca_jax.families.config_json import (
    config_from_json,
    config_to_json,
    forms_to_json,
    plain_error,
    with_forms_of_json,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, BatchSizes
from orca_jax.planning.sizes import engine_shape
from orca_jax.sharding.partition import split_model
from orca_jax.workers.environment import cpu_environment
from orca_jax.workers.json_child import ChildSilent, JsonChild

_MODULE = "orca_jax.launch.compile_process"
_BUCKET_SECONDS = 3600.0  # on a busy machine it gets a few percent of a processor
_END_SECONDS = 10.0  # from the end of its stdout to its exit


class CompilingEnded(EngineError):
    """The process that compiles has ended or was ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedEngine:
    """An engine on the CPU devices of one process, without its weights.

    `cache` is the folder of its programs.
    """

    model: ModelConfig
    serving: ServingConfig
    parallel: ParallelConfig
    dtype: str
    attention: Attention | None
    cache: str

    def as_json(self) -> dict[str, Any]:
        """JSON for `from_json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "model": config_to_json(self.model),
            "forms": forms_to_json(self.model),
            "serving": self.serving.recorded(),
            "parallel": {each.name: getattr(self.parallel, each.name) for each in fields(ParallelConfig)},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `as_json` of the same version made."""
        own = dict(values)
        model = with_forms_of_json(config_from_json(own.pop("model"), plain_error), own.pop("forms"))
        serving = ServingConfig.from_dict(own.pop("serving"))
        return cls(model=model, serving=serving, parallel=ParallelConfig(**own.pop("parallel")), **own)

    def mark(self) -> Path:
        """Name a file that says, once it exists, that all programs of this engine are in `cache`."""
        facts = [self.as_json(), version("orca_jax"), jax.__version__, len(jax.devices())]
        return Path(self.cache) / f"whole-{blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()}"

    def workers(self) -> list[Worker]:
        """Make workers that can compile, and not run."""
        dtype, parts = jnp.dtype(self.dtype), split_model(self.model, jax.devices(), self.parallel)
        shape = engine_shape(self.model, self.serving, n_workers=len(parts))
        placed = [placed_parameters(self.model, part, dtype) for part in parts]
        return stage_workers(
            self.model, placed, shape, parts, self.serving, attention=self.attention, caches=False
        )


class CompileProcess:
    """A process that compiles the programs of `buckets`, one after the other.

    `largest` is the engine's largest bucket. For one thread, except `kill`. Raises OSError if it cannot be
    started.
    """

    def __init__(self, engine: DescribedEngine, buckets: Sequence[int], largest: int) -> None:
        environment = cpu_environment(os.environ, n_devices=len(jax.devices()))
        self._child = JsonChild([sys.executable, "-m", _MODULE], environment=environment, yields=True)
        self._child.send({"engine": engine.as_json(), "buckets": list(buckets), "largest": largest})

    def wait_for(self, bucket: int) -> None:
        """Wait until the programs of the next bucket are on disk. Raises CompilingEnded."""
        try:
            answer = self._child.receive(_BUCKET_SECONDS)
        except ChildSilent as error:
            raise CompilingEnded(f"the compiling process was ended: {error}") from error
        if answer is None:
            raise CompilingEnded(f"the compiling process {self._child.how_it_ended(_END_SECONDS)}")
        assert answer == {"bucket": bucket}, answer

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it at once: `wait_for` then raises CompilingEnded. From any thread."""
        self._child.kill()

    def close(self) -> None:
        """End it and wait for its end."""
        self._child.close()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> int:
    """Compile until all is done or stdin closes."""
    question = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, name="orca-parent", daemon=True).start()
    engine = DescribedEngine.from_json(question["engine"])
    keep_compiled_programs(engine.cache)
    workers = engine.workers()
    contexts = DECODE_CONTEXTS[workers[0].attention.kind]
    for bucket in question["buckets"]:
        sizes = BatchSizes(workers[0].shape, (bucket, question["largest"]), contexts)
        for program in all_programs(workers, sizes):
            program.compile()
        print(json.dumps({"bucket": bucket}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
