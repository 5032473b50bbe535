"""One call of cuDNN's paged attention, and the models that it supports.

XLA's GPU compiler passes custom calls of this name to cuDNN as a graph. The K/V cache serves as cuDNN's page
container unchanged. If the GPU is present, cuDNN checks the graph and builds its kernel while XLA compiles
the program. For a GPU that is only described XLA skips that, so a program that compiles may be refused later.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from orca_jax.cudnn.tiles import QUERIES

MOST_HEAD_SIZE = 256
DTYPES = ("bfloat16", "float16")
_TARGET = "__cudnn$fmhaSoftmax"

Device = Any  # a jax.Device


def unsupported(
    head_size: int, block_size: int, dtype_name: str, n_heads: int, n_kv_heads: int
) -> str | None:
    """Why cuDNN's documentation excludes a model of these sizes, as a clause; None if it does not.

    `refusal` asks a GPU's cuDNN.
    """
    if head_size % 8 or not 8 <= head_size <= MOST_HEAD_SIZE:
        return f"its head size is {head_size}; cuDNN has multiples of 8 up to {MOST_HEAD_SIZE}"
    if block_size < 1 or block_size & (block_size - 1):
        return f"its blocks have {block_size} slots; cuDNN has powers of two"
    if dtype_name not in DTYPES:
        return f"its K/V cache is {dtype_name}; cuDNN has {' and '.join(DTYPES)}"
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        return f"its {n_heads} heads are not a multiple of its {n_kv_heads} key/value heads"
    return None


@functools.cache
def refusal(
    device: Device, head_size: int, block_size: int, dtype_name: str, n_heads: int, n_kv_heads: int
) -> str | None:
    """Why a GPU's cuDNN has no plan for attention of these sizes, as a clause; None if it has one.

    This detects a missing cuDNN, and one before 9.5. A GPU that is only described refuses nothing.
    """
    place = SingleDeviceSharding(device)

    def like(*shape: int, dtype: str = dtype_name) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    n_entries, n_blocks = 2, 4
    block = like(n_blocks, n_kv_heads, block_size, head_size)
    length, table = like(n_entries, dtype="int32"), like(n_entries, n_blocks, dtype="int32")
    group = n_heads // n_kv_heads
    for n_queries in (group, group * QUERIES):  # the heads of a group are queries of one key/value head
        q = like(n_entries, n_queries, n_kv_heads, head_size)
        try:
            jax.jit(functools.partial(paged_attention, scale=1.0)).lower(
                q, block, block, length, table
            ).compile()
        except jax.errors.JaxRuntimeError as error:
            return f"its cuDNN refuses: {str(error).splitlines()[0]}"
    return None


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    kv_length: jax.Array,
    block_table: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each entry's queries to all of its keys, without a causal mask.

    q [E, Q, N, D]; k_cache, v_cache [n_blocks, K, B, D] with N a multiple of K; kv_length [E] and block_table
    [E, max_blocks] int32. Entry e attends to the first kv_length[e] slots of its blocks, at least one. All
    ids in the table must be blocks, even after the entry's length: cuDNN does not document what it reads.

    Returns the result [E, Q, N, D] in q's dtype, and the logarithm of each softmax's sum, [E, N, Q] float32.
    """
    n_entries, n_queries, n_heads, head_size = q.shape
    block_size, max_blocks = k_cache.shape[2], block_table.shape[1]
    result = (
        jax.ShapeDtypeStruct((n_entries, n_heads, n_queries, head_size), q.dtype),
        jax.ShapeDtypeStruct((n_entries, n_heads, n_queries), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),  # scratch memory, for which XLA sets the size that cuDNN needs
    )
    table = block_table.reshape(n_entries, 1, max_blocks, 1)
    heads_inside = (0, 2, 1, 3)  # [E, N, Q, D] to cuDNN, [E, Q, N, D] in memory
    call = jax.ffi.ffi_call(
        _TARGET,
        result,
        custom_call_api_version=2,
        legacy_backend_config=graph(q.dtype, n_entries, n_heads, n_queries, max_blocks * block_size, scale),
        input_layouts=(heads_inside, *(tuple(range(n)) for n in (4, 4, 1, 1, 4, 4))),
        output_layouts=(heads_inside, (0, 1, 2), (0,)),
    )
    q_length = jnp.full(n_entries, n_queries, jnp.int32)
    out, log_sum, _ = call(q.swapaxes(1, 2), k_cache, v_cache, q_length, kv_length, table, table)
    return out.swapaxes(1, 2), log_sum


def graph(dtype: Any, n_entries: int, n_heads: int, n_queries: int, n_keys: int, scale: float) -> str:
    """The text that XLA parses as a CudnnfMHABackendConfig, equal to the one that JAX's attention sends."""

    def product(keys_contracted: str) -> dict[str, list[str]]:
        return {
            "lhs_contracting_dimensions": ["3"],
            "rhs_contracting_dimensions": [keys_contracted],
            "lhs_batch_dimensions": ["0", "1"],
            "rhs_batch_dimensions": ["0", "1"],
        }

    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[np.dtype(dtype).name],
        "dimensions": [str(size) for size in (n_entries, n_heads, n_queries, n_keys)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "PADDING",
        "bmm1_dot_dimension_numbers": product("3"),
        "bmm2_dot_dimension_numbers": product("2"),
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": True,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})
