"""Make tests/data/golden/linear_attention.npz: the recurrences of transformers' Qwen3-Next and Bamba.

A request goes through the chunked form in two pieces, and then through the form for one token. Arrays are
named by model and argument; `out` are the results, `state` the last state.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence

import numpy as np
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from scripts.golden.with_torch import GOLDEN, SEED

PIECES = (150, 41, 1, 1)  # the tokens of each call


def make_files(_only: Sequence[str]) -> None:
    """Write the file."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        arrays = _delta_rule() | _state_space()
    np.savez_compressed(
        GOLDEN / "linear_attention.npz", pieces=PIECES, **{name: one.numpy() for name, one in arrays.items()}
    )


def _delta_rule() -> dict[str, torch.Tensor]:
    n, n_keys, n_values, key_size, value_size = sum(PIECES), 2, 6, 12, 10
    q, k = torch.randn(2, 1, n, n_keys, key_size)
    v = torch.randn(1, n, n_values, value_size)
    decay = -torch.nn.functional.softplus(2 * torch.randn(1, n, n_values))
    beta = torch.sigmoid(2 * torch.randn(1, n, n_values))
    state, outs = None, []
    for part in zip(*(each.split(PIECES, dim=1) for each in (q, k, v, decay, beta)), strict=True):
        run = torch_recurrent_gated_delta_rule if part[0].shape[1] == 1 else torch_chunk_gated_delta_rule
        out, state = run(
            *part[:3],
            g=part[3],
            beta=part[4],
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outs.append(out)
    found = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "out": torch.cat(outs, 1), "state": state}
    return {f"delta_{name}": one[0] for name, one in found.items()}


def _state_space() -> dict[str, torch.Tensor]:
    n, n_groups, n_heads, state_size, head_size = sum(PIECES), 2, 6, 12, 10
    b, c = torch.randn(2, 1, n, n_groups, state_size)
    x = torch.randn(1, n, n_heads, head_size)
    dt, dt_bias = torch.randn(1, n, n_heads), torch.randn(n_heads)
    a, skip = -torch.rand(n_heads) * 4, torch.randn(n_heads)
    state, outs = torch.zeros(1, n_heads, head_size, state_size), []
    for xs, dts, bs, cs in zip(*(each.split(PIECES, dim=1) for each in (x, dt, b, c)), strict=True):
        if xs.shape[1] > 1:
            out, state = mamba2_chunk_scan(
                *(xs, dts, a, bs, cs),
                chunk_size=32,
                D=skip,
                dt_bias=dt_bias,
                dt_softplus=True,
                initial_states=state,
                return_final_states=True,
            )
        else:
            wide = (n_heads, head_size)
            out = mamba2_selective_state_update(
                state,
                xs[:, 0],
                dts.transpose(1, 2).expand(-1, -1, head_size),
                a[:, None, None].expand(*wide, state_size),
                bs[:, 0],
                cs[:, 0],
                skip[:, None].expand(wide),
                dt_bias=dt_bias[:, None].expand(wide),
                dt_softplus=True,
            )[:, None]
        outs.append(out)
    found = {"b": b, "c": c, "x": x, "dt": dt, "out": torch.cat(outs, 1), "state": state.mT}
    return {f"space_{name}": one[0] for name, one in found.items()} | {
        "space_a": a,
        "space_skip": skip,
        "space_dt_bias": dt_bias,
    }
