"""The kernel's list of work, which its caller makes for all layers: the one place here that knows it."""

from typing import Any

import jax
import numpy as np

from orca_jax.pallas.split_attention import split_attention
from orca_jax.pallas.work_list.bounds import Plan
from orca_jax.pallas.work_list.work_items import work_items


def plan_of(
    n_tokens: int, n_rows: int, n_kv_heads: int, group: int, *, block_size: int, n_cores: int
) -> Plan:
    """Of a list for T tokens, R rows, K key/value heads of G query heads, and blocks of B slots."""
    return Plan(n_tokens, n_rows, n_kv_heads, group, block_size, n_cores)


def work_of(row_start: np.ndarray, kv_length: np.ndarray, plan: Plan) -> np.ndarray:
    """The list of a batch, [n_records, columns] int32: `row_start` [R + 1], `kv_length` [R], on the host."""
    return work_items(row_start, kv_length, plan)


def work_shape(plan: Plan) -> jax.ShapeDtypeStruct:
    """Its shape."""
    rows = np.zeros(plan.n_rows, np.int32)
    work = work_of(np.zeros(plan.n_rows + 1, np.int32), rows, plan)
    return jax.ShapeDtypeStruct(work.shape, work.dtype)


def attend(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    row_start: Any,
    kv_length: Any,
    work: Any,
    *,
    plan: Plan,
    interpret: bool,
) -> jax.Array:
    """The kernel, with its list."""
    return split_attention(
        q, k_cache, v_cache, block_table, row_start, kv_length, work=work, plan=plan, interpret=interpret
    )
