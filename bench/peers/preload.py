"""The environment of vLLM on a CPU: its variables, and the libraries that its documentation says to preload.

These are tcmalloc, and Intel's OpenMP. Without them vLLM is about 10 % slower on two cores. tcmalloc is a
system package (libtcmalloc-minimal4); OpenMP comes with pip's intel-openmp, which installs it into the
environment's lib folder.
"""

import os
from collections.abc import Sequence
from pathlib import Path

_SYSTEM = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_WANTED = {"tcmalloc": "libtcmalloc_minimal.so.4", "OpenMP": "libiomp5.so"}


def preloaded(python: str, system: Sequence[str] = _SYSTEM) -> tuple[str, tuple[str, ...]]:
    """LD_PRELOAD for an engine that runs under `python`, and the names of the libraries that are missing.

    The environment's libraries come before the system's; an existing LD_PRELOAD comes last.
    """
    folders = [Path(os.path.abspath(python)).parents[1] / "lib", *map(Path, system)]
    paths: list[str] = []
    missing: list[str] = []
    for name, file in _WANTED.items():
        path = next((str(folder / file) for folder in folders if (folder / file).is_file()), None)
        if path is None:
            missing.append(f"{name} ({file})")
        else:
            paths.append(path)
    before = os.environ.get("LD_PRELOAD")
    return ":".join([*paths, *([before] if before else [])]), tuple(missing)


def vllm_variables(python: str, cores: int) -> dict[str, str]:
    """vLLM's environment variables unless they are already set; prints which libraries are missing."""
    preload, missing = preloaded(python)
    for library in missing:
        # Among the results, so that no figure is kept without it.
        print(f"! vLLM runs without {library}, which its documentation advises on a CPU")
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    wanted |= {key: os.environ[key] for key in wanted if key in os.environ}
    return wanted | ({"LD_PRELOAD": preload} if preload else {})
