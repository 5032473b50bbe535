"""What is asked of a process that knows JAX and XLA, by one that need not: its memory plan, or a CPU's rates.

A process of its own, because a compiler may take long or end in a crash, and must not look for a GPU.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, cast

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.families.config_json import config_to_json
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import CPU
from orca_jax.processes.json_child import ChildSilent, JsonChild

_MODULE = "orca_jax.aot.memory_plan"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_MEASURE_SECONDS = 120.0
_END_SECONDS = 10.0  # from the end of its stdout to its own


class NoAnswer(EngineError):
    """XLA cannot tell: no compiler for that device is installed, it failed, or it took too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryQuestion:
    """A model on devices of a kind, with the sizes that its programs are compiled for.

    `n_rows` are the places of all admitted requests.
    """

    device: str
    model: ModelConfig
    serving: ServingConfig
    dtype: str
    parallel: ParallelConfig
    n_rows: int


def ask_memory(question: MemoryQuestion, seconds: float) -> tuple[int, ...]:
    """Temporaries of each stage's programs as XLA plans them, in bytes of each device.

    It compiles each stage that is unlike the others; nothing is run. Raises NoAnswer.
    """
    if question.device != CPU and not any(map(find_spec, _PLUGINS)):
        raise NoAnswer("no CUDA plugin for JAX is installed (pip install 'orca_jax[cuda]')")
    answer = _ask(
        asdict(question) | {"model": config_to_json(question.model)},
        seconds,
        {"JAX_NUM_CPU_DEVICES": str(question.parallel.n_devices)},
    )
    temporaries = cast("Sequence[int]", answer.get("temporaries", ()))
    if len(temporaries) != question.parallel.pipeline_parallel:
        raise NoAnswer("XLA's answer makes no sense")
    return tuple(temporaries)


def ask_rates(dtype: str) -> tuple[float, float]:
    """This CPU's memory bandwidth in bytes, and its rate of matrix products in operations, a second.

    Measured now, which takes some seconds. Raises NoAnswer.
    """
    answer = _ask({"measure": dtype}, _MEASURE_SECONDS, {})
    return float(answer["bandwidth"]), float(answer["matrix_rate"])


def _ask(question: Mapping[str, Any], seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    variables = {**os.environ, **environment, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with JsonChild([sys.executable, "-m", _MODULE], environment=variables) as child:
        try:
            answer = child.ask(question, seconds, last=True)
        except ChildSilent as error:
            raise NoAnswer(f"XLA did not finish within {seconds:g} seconds") from error
        if answer is None:
            status = child.wait(_END_SECONDS)
            lines = child.last_words().strip().splitlines() or ["it said nothing"]
            raise NoAnswer(f"XLA's compiler ended with status {status}: {lines[-1][:300]}")
    return answer
