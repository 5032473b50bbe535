"""XLA's memory plan for a stage's programs, for devices that need not be present.

    python -m orca_jax.aot.memory_plan < question.json

workers/ask_xla.py runs this command, which reads a question in JSON from stdin and prints the answer as the
last line of stdout.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages

from orca_jax.aot.compiled_stage import compile_stage, described_array
from orca_jax.aot.described_gpu import described_devices
from orca_jax.aot.measured_device import measure_device
from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.families.config_json import config_from_json, plain_error, with_forms_of_json
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.model.sampler import sample
from orca_jax.planning.known_devices import CPU
from orca_jax.planning.stage_memory import KEPT_ITERATIONS
from orca_jax.sharding.partition import StagePart, split_model


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """Memory of a stage's programs, in bytes per device.

    `arguments` are the weights, the K/V cache and an iteration's buffer. `temporaries` are the largest that
    one program needs, plus the hidden states and results that are kept.
    """

    arguments: int
    temporaries: int


def compiled_memory(
    model: ModelConfig, part: StagePart, serving: ServingConfig, *, n_rows: int, dtype: jnp.dtype
) -> CompiledMemory:
    """XLA's memory plan for a stage's largest programs.

    These are the forward pass of the largest bucket and, on the last stage, prompt scoring and the full
    sampler.
    """
    compiled = compile_stage(
        model,
        part,
        serving.max_batch_tokens,
        max_bs=serving.max_batch_size,
        n_blocks=serving.n_blocks,
        n_rows=n_rows,
        block_size=serving.block_size,
        dtype=dtype,
        deterministic=serving.deterministic,
        command_buffer_collectives=serving.command_buffer_collectives,
    )
    programs = [compiled.program]
    if compiled.score is not None:
        programs += [compiled.score.compile(), _sampler(model, part, serving.max_batch_size)]
    needed = max(_temporaries(program) for program in programs)
    memory = compiled.program.memory_analysis()
    assert memory is not None
    hidden = serving.max_batch_tokens * model.hidden_size * dtype.itemsize
    arrived = 0 if part.first else hidden  # an argument, but kept like a result
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # all but the donated caches
    return CompiledMemory(
        arguments=memory.argument_size_in_bytes - arrived,
        temporaries=needed + KEPT_ITERATIONS * (arrived + results),
    )


def alike_stages(model: ModelConfig, parts: tuple[StagePart, ...]) -> Iterator[tuple[int, int]]:
    """Yield each stage's index with the index of the first stage that has the same programs.

    Stages have the same programs if their layers are equal and both or neither are first, and last.
    """
    seen: dict[tuple[tuple[Layer, ...], bool, bool], int] = {}
    for i, part in enumerate(parts):
        layers = model.layers[part.layers.start : part.layers.stop]
        yield i, seen.setdefault((layers, part.first, part.last), i)


def _sampler(model: ModelConfig, part: StagePart, n_rows: int) -> jax.stages.Compiled:
    place = part.group.place()
    row = partial(described_array, (n_rows,), place)
    logits = described_array((n_rows, model.vocab_size), place, jnp.float32)
    real, whole = row(jnp.float32), row(jnp.int32)
    full = jax.jit(partial(sample, cut=True))
    return full.lower(logits, real, whole, real, real, whole, whole, whole).compile()


def _temporaries(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None, "XLA plans the memory of every program"
    return memory.temp_size_in_bytes


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    if "measure" in question:
        device = measure_device(jnp.dtype(question["measure"]))
        return {"bandwidth": device.bandwidth, "matrix_rate": device.matrix_rate}
    model = with_forms_of_json(config_from_json(question["model"], plain_error), question["forms"])
    serving = ServingConfig.from_dict(question["serving"])
    parallel = ParallelConfig(**question["parallel"])
    kind = question["device"]
    devices = jax.devices() if kind == CPU else described_devices(kind, parallel.n_devices)
    parts = split_model(model, devices, parallel)
    temporaries: list[int] = []
    for i, like in alike_stages(model, parts):
        if like < i:
            temporaries.append(temporaries[like])
            continue
        n_rows = question["n_rows"]
        dtype = jnp.dtype(question["dtype"])
        memory = compiled_memory(model, parts[i], serving, n_rows=n_rows, dtype=dtype)
        temporaries.append(memory.temporaries)
    return {"temporaries": temporaries, "jax": jax.__version__}


def main() -> int:
    """Answer one question."""
    print(json.dumps(_answer(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
