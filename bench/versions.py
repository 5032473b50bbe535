"""The versions a measurement depends on: Python, JAX and its parts, the driver, and the device.

    python -m bench.versions

One line each, the last one JSON. If nvidia-smi is missing or does not answer, a line says so.
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
    """The versions of installed packages that results depend on."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    for package in distributions():
        name = str(package.metadata["Name"]).lower()
        if name.startswith(_NVIDIA):
            versions[name] = package.version
    return versions


def driver() -> str:
    """nvidia-smi's report on every GPU, or why there is none."""
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
    """JAX's first device."""
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
    """Print everything."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": packages(),
        "driver": driver(),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    for name, value in report.items():
        print(f"{name}: {value}", flush=True)
    print(json.dumps({"bench": "versions"} | report))


if __name__ == "__main__":
    main()
