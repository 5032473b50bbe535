"""Compiles the kernel that writes keys and values for a GPU that need not be present.

    JAX_PLATFORMS=cpu python -m tests.device.aot.place_programs DEVICE

The last line has in JSON, for each size, how often the program launches the kernel and what else it launches.
"""

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from bench.compiled.hlo_traffic import counts
from orca_jax.aot.described_gpu import described_devices
from orca_jax.pallas.place import place

# G, K, D, rotated elements, and whether pairs are adjacent; the last is a model without rotation.
SIZES = [(4, 8, 128, 128, 0), (16, 1, 64, 64, 1), (1, 40, 80, 20, 0), (2, 16, 256, 64, 1), (1, 12, 64, 0, 0)]
N_TOKENS, BLOCK_SIZE = 32, 16
# Fewer and more than 4 GiB, where offsets take 64 bits.
N_BLOCKS = (64, 1 << 18)


def _written(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    """The cache's arrays alone, where queries are read from the product."""
    return place(*arrays, n_queries=0, **options)[1:]


def main() -> None:
    """Compile each size with donated caches."""
    mesh = Mesh(np.array(described_devices(sys.argv[1], 1)), ("device",))
    here = NamedSharding(mesh, PartitionSpec())
    abstract = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # says for which GPU Triton compiles

    def array(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    found: dict[str, tuple[int, float]] = {}
    for group, n_kv_heads, head_size, rotated, interleaved in SIZES:
        for n_blocks in N_BLOCKS:
            qkv = array(N_TOKENS, group + 2, n_kv_heads, head_size)
            angles = [array(N_TOKENS, rotated // 2, dtype=jnp.float32) if rotated else None] * 2
            cache = array(n_blocks, n_kv_heads, BLOCK_SIZE, head_size)
            options = {"key": group, "interleaved": bool(interleaved)}
            run = partial(place, n_queries=group, **options) if rotated else partial(_written, **options)
            slots = array(N_TOKENS, dtype=jnp.int32)
            with abstract:
                lowered = jax.jit(run, donate_argnums=(5, 6)).lower(qkv, qkv, slots, *angles, cache, cache)
            text = lowered.compile().as_text()
            assert text is not None
            name = f"{group} {n_kv_heads} {head_size} {rotated} {interleaved} {n_blocks}"
            found[name] = text.count("__gpu$xla.gpu.triton"), counts(text).launches
    print(json.dumps(found))


if __name__ == "__main__":
    main()
