"""What is measured on: Python, JAX and its parts, the driver, and the device with its memory and clocks.

    python -m bench.versions

A line each, last one of JSON. Where there is no nvidia-smi, or it does not answer, that is said.
"""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "vllm")
_NVIDIA = ("jax-cuda", "nvidia-cudnn", "nvidia-cublas", "nvidia-nccl", "nvidia-cuda-runtime")
_ASKED = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.limit,mig.mode.current"
)


def packages() -> dict[str, str]:
    """Those that figures depend on, as far as they are installed."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for one in distributions():
        name = str(one.metadata["Name"]).lower()
        if name.startswith(_NVIDIA):
            found[name] = one.version
    return found


def driver() -> str:
    """What nvidia-smi says of every GPU, or why it says nothing."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "there is no nvidia-smi here"
    try:
        done = subprocess.run(
            [command, f"--query-gpu={_ASKED}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return done.stdout.strip() or f"nvidia-smi ended with status {done.returncode}: {done.stderr.strip()}"


def device() -> dict[str, Any]:
    """The first device that JAX has."""
    first: Any = jax.devices()[0]
    stats = first.memory_stats() or {}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "compute_capability": str(getattr(first, "compute_capability", "")),
        "core_count": getattr(first, "core_count", None),
        "bytes_limit": stats.get("bytes_limit"),
        "devices": len(jax.devices()),
        "platform_version": first.client.platform_version,
    }


def main() -> None:
    """Say all of it."""
    told: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": packages(),
        "driver": driver(),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    for name, value in told.items():
        print(f"{name}: {value}", flush=True)
    print(json.dumps({"bench": "versions"} | told))


if __name__ == "__main__":
    main()
