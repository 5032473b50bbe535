"""The environment of a stage's process: the devices of this machine that it sees, and its memory there."""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from orca_jax.config import COMPILE_CACHE, ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.planning.known_devices import MEMORY_FRACTION

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HOST_DEVICES = "--xla_force_host_platform_device_count"
_HOST_DEVICES_FLAG = re.compile(rf"(?:^|\s+){_HOST_DEVICES}=\S*")
_JAX_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"  # overrides the flag
_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_SHARES = (_MEMORY_SHARE, "XLA_CLIENT_MEM_FRACTION")  # XLA rejects having both set
_JAX_FRACTION = 0.75  # JAX's default
_COMPILE_CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's own
_GPU_FILE = re.compile(r"(?:.*/)?nvidia[0-9]+")
_INDEX = re.compile(r"[0-9]+")


def visible_gpus(environ: Mapping[str, str], device_files: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that a process with this environment sees, as CUDA_VISIBLE_DEVICES names them.

    `device_files` are the file names in /dev. Without CUDA_VISIBLE_DEVICES the process sees all GPUs. If /dev
    has no GPU file, as under WSL, any index counts. As in CUDA, the list ends before the first invalid entry,
    and a duplicate entry makes it empty.
    """
    platforms = {name.strip().lower() for name in environ.get("JAX_PLATFORMS", "").split(",")} - {""}
    if platforms == {"cpu"}:
        return ()
    n_files = sum(_GPU_FILE.fullmatch(name) is not None for name in device_files)
    if _VISIBLE not in environ:
        return tuple(str(index) for index in range(n_files))
    visible = list[str]()
    for entry in environ[_VISIBLE].split(","):
        name = entry.strip()
        if _INDEX.fullmatch(name):
            if n_files and int(name) >= n_files:
                break
            name = str(int(name))
        elif not name.startswith(("GPU-", "MIG-")):
            break
        visible.append(name)
    return tuple(visible) if len(set(visible)) == len(visible) else ()


def compile_cache_folder(folder: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """The folder for compiled programs; None if `folder` is None.

    JAX_COMPILATION_CACHE_DIR replaces `folder` if that is COMPILE_CACHE, the default.
    """
    if folder is not None and str(folder) == COMPILE_CACHE:
        folder = environ.get(_COMPILE_CACHE) or folder
    return None if folder is None else Path(folder).expanduser()


def cpu_environment(environ: Mapping[str, str], *, n_devices: int | None = None) -> dict[str, str]:
    """The environment of a process that uses the CPU alone, as `n_devices` devices, and logs little."""
    devices = {} if n_devices is None else {_JAX_HOST_DEVICES: str(n_devices)}
    return {**environ, **devices, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def hold_memory(environ: MutableMapping[str, str], fraction: float) -> None:
    """Make JAX reserve this fraction of each GPU's memory, unless `environ` already sets one.

    Has an effect only before JAX first looks at its devices.
    """
    if not sets_memory(environ):
        environ[_MEMORY_SHARE] = f"{fraction:.4g}"


def sets_memory(environ: Mapping[str, str]) -> bool:
    """Whether the environment sets the fraction of a GPU's memory that JAX reserves."""
    return any(environ.get(name) for name in _MEMORY_SHARES)


def held_fraction(environ: Mapping[str, str]) -> float | None:
    """The fraction of a GPU's memory that JAX reserves with this environment; None if it is invalid."""
    settings = [text for name in _MEMORY_SHARES if (text := environ.get(name))]
    try:
        fraction = float(settings[0]) if settings else _JAX_FRACTION
    except ValueError:
        return None
    return fraction if 0 < fraction <= 1 else None


def worker_environment(
    stage: int,
    parallel: ParallelConfig,
    environ: Mapping[str, str],
    gpus: Sequence[str],
    *,
    memory_fraction: float | None = None,
) -> dict[str, str]:
    """A copy of `environ` for the process of one stage (from 0), in which it sees only its own devices.

    `gpus` come from `visible_gpus`, and each stage gets its own. If there are too few and a stage needs only
    one, neighbouring stages share a GPU and split its memory equally. Without GPUs, the CPU counts as the
    stage's devices. All stages on a GPU together reserve `memory_fraction` of its memory. Raises ConfigError
    if stages of several GPUs would have to share.
    """
    n_stages, n_each = parallel.pipeline_parallel, parallel.tensor_parallel
    assert 0 <= stage < n_stages
    environment = {**environ, "PYTHONUNBUFFERED": "1"}
    n_sharing = 1
    if not gpus:
        _count_host_devices(environment, n_each)
    elif len(gpus) >= parallel.n_devices:
        environment[_VISIBLE] = ",".join(gpus[stage * n_each : (stage + 1) * n_each])
    elif n_each == 1:
        place = _place(stage, n_stages, len(gpus))
        environment[_VISIBLE] = gpus[place]
        n_sharing = sum(_place(other, n_stages, len(gpus)) == place for other in range(n_stages))
    else:
        raise ConfigError(
            f"{n_stages} stages of {n_each} GPUs each need {parallel.n_devices} GPUs, but only {len(gpus)} "
            f"are visible: {','.join(gpus)}; make more visible with {_VISIBLE}, or use fewer stages or fewer "
            "GPUs in a stage (stages of one GPU can share it)"
        )
    if gpus:
        hold_memory(environment, (memory_fraction or MEMORY_FRACTION) / n_sharing)
    return environment


def _place(stage: int, n_stages: int, n_gpus: int) -> int:
    return stage * n_gpus // n_stages


def _count_host_devices(environment: dict[str, str], count: int) -> None:
    """Set the number of CPU devices. A single device needs no flag, but replaces one set for all stages."""
    flags = environment.get("XLA_FLAGS", "")
    if count > 1 or _HOST_DEVICES_FLAG.search(flags):
        others = _HOST_DEVICES_FLAG.sub("", flags).strip()
        environment["XLA_FLAGS"] = f"{others} {_HOST_DEVICES}={count}".strip()
    if _JAX_HOST_DEVICES in environment:
        environment[_JAX_HOST_DEVICES] = str(count)
