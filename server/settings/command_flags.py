"""The flags of `orca worker` and `orca plan` alone, declared as the engine's options are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from orca_jax.workers.worker_options import WorkerLink


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """The stage, its addresses and its link. The server sends the batch sizes."""

    stage: Annotated[int, "number of this stage, from 1"]
    of: Annotated[int, "number of stages"]
    listen: Annotated[str, "HOST:PORT for control messages; a host other than loopback needs a secret"]
    data_host: Annotated[
        str | None,
        "address at which the next stage's worker reaches this one for activations (default: the host of "
        "--listen)",
    ] = None
    link: Annotated[
        WorkerLink,
        "how activations reach the next stage's process; nccl: over NVLink or InfiniBand, but losing one "
        "worker restarts all",
    ] = "transfer"
    coordinator: Annotated[
        str | None, "with --link nccl: HOST:PORT on stage 1's machine at which all workers meet"
    ] = None
    control_secret_file: Annotated[
        Path | None, "file with the secret shared by server and workers; or set ORCA_CONTROL_SECRET"
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The devices, and what is computed for them."""

    device: Annotated[
        str, "device to plan for: a100-40gb, a100-80gb, l40s, h100, h200, b200, or cpu (this machine's)"
    ]
    context: Annotated[
        int | None, "cached tokens per request, for the floors (default: half the model's positions)"
    ] = None
    latency_budget: Annotated[
        str | None,
        "recommend the largest max_bs that keeps the time between two tokens of a request within this, for "
        "example 50ms or 0.05s; a plain number means seconds (default: none)",
    ] = None
    memory: Annotated[float | None, "memory of each device in GiB (default: the data sheet's)"] = None
    bandwidth: Annotated[float | None, "measured memory bandwidth in GB/s (default: the data sheet's)"] = None
    matrix_rate: Annotated[
        float | None, "measured rate of matrix products in TFLOP/s (default: the data sheet's)"
    ] = None
    compile: Annotated[
        bool, "compile with XLA, if its compiler for the device is installed, to size temporaries exactly"
    ] = True
    compile_timeout: Annotated[float, "seconds to wait for XLA before estimating"] = 600.0
    json: Annotated[bool, "print one JSON object instead of tables"] = False
