"""Asks a child process that imports JAX for XLA's memory plan or for a CPU's rates.

A separate process, because the compiler may take long or crash, and must not look for a GPU.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, cast

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.errors import EngineError, install_line
from orca_jax.families.config_json import config_to_json, forms_to_json
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import CPU
from orca_jax.workers.environment import cpu_environment
from orca_jax.workers.json_child import ChildSilent, JsonChild

_MODULE = "orca_jax.aot.memory_plan"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_MEASURE_SECONDS = 120.0
_END_SECONDS = 10.0  # from the end of the child's stdout to its exit


class NoAnswer(EngineError):
    """XLA gave no answer: no compiler for that device is installed, it failed, or it took too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryQuestion:
    """A model, its devices, and the sizes that its programs are compiled for.

    `n_rows` is how many requests may be admitted at a time.
    """

    device: str
    model: ModelConfig
    serving: ServingConfig
    dtype: str
    parallel: ParallelConfig
    n_rows: int


def ask_memory(question: MemoryQuestion, seconds: float) -> tuple[int, ...]:
    """XLA's planned temporaries of each stage's programs, in bytes per device.

    XLA compiles each distinct stage and runs nothing. Raises NoAnswer.
    """
    if question.device != CPU and not any(map(find_spec, _PLUGINS)):
        raise NoAnswer(f"no CUDA plugin for JAX is installed: {install_line('cuda')}")
    answer = _ask(
        asdict(question) | {"model": config_to_json(question.model), "forms": forms_to_json(question.model)},
        seconds,
        n_devices=question.parallel.n_devices,
    )
    temporaries = cast("Sequence[int]", answer.get("temporaries", ()))
    if len(temporaries) != question.parallel.pipeline_parallel:
        message = f"XLA's answer has temporaries of {len(temporaries)} stages instead of "
        raise NoAnswer(message + f"{question.parallel.pipeline_parallel}")
    return tuple(temporaries)


def ask_rates(dtype: str) -> tuple[float, float]:
    """Measure this CPU's memory bandwidth in bytes/s, and its matrix rate in floating-point operations/s.

    Takes a few seconds. Raises NoAnswer.
    """
    answer = _ask({"measure": dtype}, _MEASURE_SECONDS)
    return float(answer["bandwidth"]), float(answer["matrix_rate"])


def _ask(question: Mapping[str, Any], seconds: float, *, n_devices: int | None = None) -> dict[str, Any]:
    variables = cpu_environment(os.environ, n_devices=n_devices)
    with JsonChild([sys.executable, "-m", _MODULE], environment=variables) as child:
        try:
            answer = child.ask(question, seconds, last=True)
        except ChildSilent as error:
            raise NoAnswer(f"XLA did not finish: {error}") from error
        if answer is None:
            raise NoAnswer(f"XLA's compiler {child.how_it_ended(_END_SECONDS)}")
    return answer
