"""Which devices of one machine the process of each stage may see: what its environment says of them."""

import re
from collections.abc import Mapping, Sequence

from orca_jax.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HOST_DEVICES = "--xla_force_host_platform_device_count"
_HOST_DEVICES_FLAG = re.compile(rf"(?:^|\s+){_HOST_DEVICES}=\S*")
_JAX_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"  # stands above the flag where it is set
_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_SHARES = (_MEMORY_SHARE, "XLA_CLIENT_MEM_FRACTION")  # XLA refuses to be given both
_SHARED_MEMORY = 0.9  # of a GPU's memory, for all stages on it together
_GPU_FILE = re.compile(r"(?:.*/)?nvidia[0-9]+")
_INDEX = re.compile(r"[0-9]+")


def visible_gpus(environ: Mapping[str, str], device_files: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    `device_files` are the names in /dev. Without CUDA_VISIBLE_DEVICES all GPUs are seen. An index is
    believed where there is no file of a GPU at all, as under WSL. As with CUDA, the first entry that names no
    GPU ends the list, and one that stands there twice empties it.
    """
    platforms = {name.strip().lower() for name in environ.get("JAX_PLATFORMS", "").split(",")} - {""}
    if platforms == {"cpu"}:
        return ()
    n_files = sum(_GPU_FILE.fullmatch(name) is not None for name in device_files)
    if _VISIBLE not in environ:
        return tuple(str(index) for index in range(n_files))
    seen = list[str]()
    for entry in environ[_VISIBLE].split(","):
        name = entry.strip()
        if _INDEX.fullmatch(name):
            if n_files and int(name) >= n_files:
                break
            name = str(int(name))
        elif not name.startswith(("GPU-", "MIG-")):
            break
        seen.append(name)
    return tuple(seen) if len(set(seen)) == len(seen) else ()


def worker_environment(
    stage: int, n_stages: int, tensor_parallel: int, environ: Mapping[str, str], gpus: Sequence[str]
) -> dict[str, str]:
    """A copy of `environ` for the process of one stage (from 0), which then sees that stage's devices alone.

    With `gpus`, those of `visible_gpus`, each stage gets `tensor_parallel` of its own. If they are too few
    and a stage needs only one, neighbouring stages share one, and its memory in equal parts. Without, the CPU
    counts as `tensor_parallel` devices. Raises ConfigError when stages of several GPUs would have to share.
    """
    assert 0 <= stage < n_stages and tensor_parallel >= 1
    environment = {**environ, "PYTHONUNBUFFERED": "1"}
    if not gpus:
        _count_host_devices(environment, tensor_parallel)
    elif len(gpus) >= n_stages * tensor_parallel:
        own = gpus[stage * tensor_parallel : (stage + 1) * tensor_parallel]
        environment[_VISIBLE] = ",".join(own)
    elif tensor_parallel == 1:
        place = _place(stage, n_stages, len(gpus))
        environment[_VISIBLE] = gpus[place]
        n_sharing = sum(_place(other, n_stages, len(gpus)) == place for other in range(n_stages))
        if n_sharing > 1 and not any(environ.get(name) for name in _MEMORY_SHARES):
            environment[_MEMORY_SHARE] = f"{_SHARED_MEMORY / n_sharing:.4g}"
    else:
        needed = n_stages * tensor_parallel
        raise ConfigError(
            f"{n_stages} stages of {tensor_parallel} GPUs each need {needed}, and the visible ones are "
            f"{len(gpus)}: {','.join(gpus)}; make more visible with {_VISIBLE}, or lower "
            "the number of stages or of GPUs in a stage (stages of one GPU can share it)"
        )
    return environment


def _place(stage: int, n_stages: int, n_gpus: int) -> int:
    return stage * n_gpus // n_stages


def _count_host_devices(environment: dict[str, str], count: int) -> None:
    """One device needs no flag, but what the server was given for all its stages is too many for one."""
    flags = environment.get("XLA_FLAGS", "")
    if count > 1 or _HOST_DEVICES_FLAG.search(flags):
        others = _HOST_DEVICES_FLAG.sub("", flags).strip()
        environment["XLA_FLAGS"] = f"{others} {_HOST_DEVICES}={count}".strip()
    if _JAX_HOST_DEVICES in environment:
        environment[_JAX_HOST_DEVICES] = str(count)
