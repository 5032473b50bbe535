"""Compiles a T5's programs for a GPU that need not be present, and prints a report in JSON.

JAX_PLATFORMS=cpu python -m tests.device.aot.encoder_programs
"""

import json
import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.aot.compiled_stage import (
    BLOCK_SIZE,
    DTYPE,
    compile_stage,
    described_array,
    described_caches,
    described_stage,
)
from orca_jax.aot.described_gpu import described_devices
from orca_jax.families.parameters import parameter_shapes
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.flat_batch import FlatLayout
from orca_jax.model.kv_cache import cache_shape
from orca_jax.sharding.partition import split_model

N_LAYERS, N_BLOCKS, MAX_BS, BUCKET = 2, 1000, 8, 64
_WHOLE = PRESETS["t5-small"]
assert _WHOLE.encoder is not None
MODEL = replace(
    _WHOLE,
    layers=_WHOLE.layers[:1] * N_LAYERS,
    encoder=replace(_WHOLE.encoder, layers=_WHOLE.encoder.layers[:1] * N_LAYERS),
)
KEPT = {math.prod(shape) for shape in parameter_shapes(MODEL).values() if len(shape) > 1}
KEPT |= {math.prod(cache_shape(MODEL.attention, n_blocks=N_BLOCKS, block_size=BLOCK_SIZE))}


def copies_of_kept(text: str) -> list[str]:
    """Copies and transposes with as many elements as a weight or a cache, in any fusion."""
    found = re.findall(r"= (\w+\[([\d,]+)\])\S* (?:copy|transpose)\(", text)
    return [shape for shape, sizes in found if math.prod(map(int, sizes.split(","))) in KEPT]


def described(program: jax.stages.Compiled) -> dict[str, Any]:
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    loops = text.count(" while(") - text.count("known_trip_count")
    return {
        "copies": copies_of_kept(text),
        "loops led by the host": loops,
        "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
    }


def main() -> None:
    """Report on the encoder, cross attention's cache, and the decoder's forward pass."""
    (part,) = split_model(MODEL, described_devices("h200", 1))
    assert MODEL.encoder is not None
    stage, chosen = described_stage(MODEL, part)
    layout = FlatLayout(BUCKET, MAX_BS, -(-MODEL.encoder.n_positions // BLOCK_SIZE))
    stored, place = chosen.stored(part.group.devices[0], DTYPE), part.group.place()
    caches = described_caches(MODEL, part, N_BLOCKS, BLOCK_SIZE, stored)
    buffer = described_array((layout.size,), place, jnp.int32)
    encoded = described_array((BUCKET, MODEL.hidden_size), place)
    encode = stage.encode.lower(stage.weights, caches[0], buffer, layout=layout).compile()
    cross = stage.cross.lower(stage.weights, caches, encoded, buffer, layout=layout).compile()
    forward = compile_stage(MODEL, part, MAX_BS, max_bs=MAX_BS, n_blocks=N_BLOCKS)
    programs = {"encode": encode, "cross": cross, "forward": forward.program}
    found = {name: described(program) for name, program in programs.items()}
    print(json.dumps({"attention": forward.attention, "programs": found}))


if __name__ == "__main__":
    main()
