"""Which devices of one machine the process of each stage may see: what its environment says of them."""

import re
from collections.abc import Mapping, MutableMapping, Sequence

from orca_jax.config import ParallelConfig
from orca_jax.errors import ConfigError
from orca_jax.planning.known_devices import MEMORY_FRACTION

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HOST_DEVICES = "--xla_force_host_platform_device_count"
_HOST_DEVICES_FLAG = re.compile(rf"(?:^|\s+){_HOST_DEVICES}=\S*")
_JAX_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"  # stands above the flag where it is set
_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_SHARES = (_MEMORY_SHARE, "XLA_CLIENT_MEM_FRACTION")  # XLA refuses to be given both
_JAX_FRACTION = 0.75  # what JAX holds unless its environment says
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


def hold_memory(environ: MutableMapping[str, str], fraction: float) -> None:
    """Have JAX hold that share of each GPU's memory, unless `environ` says how much already.

    It counts until JAX has looked at its devices.
    """
    if not says_memory(environ):
        environ[_MEMORY_SHARE] = f"{fraction:.4g}"


def says_memory(environ: Mapping[str, str]) -> bool:
    """Whether it says how much of a GPU's memory JAX shall hold."""
    return any(environ.get(name) for name in _MEMORY_SHARES)


def held_fraction(environ: Mapping[str, str]) -> float | None:
    """The share of a GPU's memory that JAX holds in such a process; None where that is no number."""
    said = [text for name in _MEMORY_SHARES if (text := environ.get(name))]
    try:
        fraction = float(said[0]) if said else _JAX_FRACTION
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
    """A copy of `environ` for the process of one stage (from 0), which then sees that stage's devices alone.

    With `gpus`, those of `visible_gpus`, each stage gets its own. If they are too few
    and a stage needs only one, neighbouring stages share one, and its memory in equal parts. Without, the CPU
    counts as that many devices. JAX holds `memory_fraction` of a GPU's memory there, all stages on it
    together. Raises ConfigError when stages of several GPUs would have to share.
    """
    n_stages, n_each = parallel.pipeline_parallel, parallel.tensor_parallel
    assert 0 <= stage < n_stages
    environment = {**environ, "PYTHONUNBUFFERED": "1"}
    n_sharing = 1
    if not gpus:
        _count_host_devices(environment, n_each)
    elif len(gpus) >= parallel.n_devices:
        own = gpus[stage * n_each : (stage + 1) * n_each]
        environment[_VISIBLE] = ",".join(own)
    elif n_each == 1:
        place = _place(stage, n_stages, len(gpus))
        environment[_VISIBLE] = gpus[place]
        n_sharing = sum(_place(other, n_stages, len(gpus)) == place for other in range(n_stages))
    else:
        raise ConfigError(
            f"{n_stages} stages of {n_each} GPUs each need {parallel.n_devices}, and the visible ones are "
            f"{len(gpus)}: {','.join(gpus)}; make more visible with {_VISIBLE}, or lower "
            "the number of stages or of GPUs in a stage (stages of one GPU can share it)"
        )
    if gpus:
        hold_memory(environment, (memory_fraction or MEMORY_FRACTION) / n_sharing)
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
