"""Compiles two layers of cuDNN attention for GPUs that need not be present, and prints a report in JSON.

JAX_PLATFORMS=cpu python -m tests.device.aot.cudnn_programs
"""

import json
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.aot.described_gpu import described_devices
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.iteration.flat_batch import FlatLayout
from orca_jax.model.kv_cache import LayerCache
from tests.gpt_config import gpt_config

KINDS = ("a100-80gb", "l40s", "h200", "b200")
N_LAYERS, HEADS, HEAD_SIZE, BLOCK, N_BLOCKS = 2, 4, 64, 16, 50
MODEL = gpt_config(
    vocab_size=64,
    n_positions=512,
    hidden_size=HEADS * HEAD_SIZE,
    n_layers=N_LAYERS,
    n_heads=HEADS,
    ffn_size=64,
)
LAYOUTS = (FlatLayout(1, 1, 32), FlatLayout(128, 8, 32))


def program(kind: str, layout: FlatLayout) -> dict[str, Any]:
    """The default attention, and numbers of cuDNN calls, uncopied caches, copies and loops."""
    device = described_devices(kind, 1)[0]
    choose = partial(choose_attention, device, MODEL, n_heads=HEADS, block_size=BLOCK, dtype="bfloat16")
    path = choose(forced="cudnn").path
    place = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

    def like(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def attend(q: jax.Array, caches: list[LayerCache], buffer: jax.Array) -> jax.Array:
        bound = path.bind(layout, layout.split(buffer), buffer[layout.size :])
        for cache in caches:
            q = bound(q[:, None], cache, MODEL.attention, None, None)[:, 0]
        return q

    cache = like(N_BLOCKS, HEADS, BLOCK, HEAD_SIZE)
    buffer = like(layout.size + path.n_words(layout), dtype=jnp.int32)
    caches = [LayerCache(cache, cache)] * N_LAYERS
    lowered = jax.jit(attend).lower(like(layout.n_tokens, HEADS, HEAD_SIZE), caches, buffer)
    text = lowered.compile().as_text()
    assert text is not None
    calls = re.findall(r" custom-call\(([^)]*)\), custom_call_target=\"__cudnn\$fmhaSoftmax\"", text)
    operands = [re.sub(r"/\*.*?\*/", "", call).split(", ") for call in calls]
    return {
        "default": choose().kind,
        "calls": len(calls),
        "own caches": sum(
            call[1].startswith("%caches_") and call[2].startswith("%caches_") for call in operands
        ),
        "copies": len(re.findall(r" copy\(| transpose\(", text[text.index("ENTRY") :])),
        "loops": text.count(" while("),
    }


def main() -> None:
    """Report on each GPU and each layout."""
    print(json.dumps({kind: [program(kind, layout) for layout in LAYOUTS] for kind in KINDS}))


if __name__ == "__main__":
    main()
