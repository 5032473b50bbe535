"""XLA's flags for the tests and the processes they start."""

import os
from importlib.metadata import PackageNotFoundError, version

DEVICES = "--xla_force_host_platform_device_count"


def quick_compile() -> list[str]:
    """Flags that turn XLA's optimizations off: the tests spend most of their time compiling small programs,
    and it takes a quarter of the time. With ORCA_TESTS_OPTIMIZED=1 programs are compiled as users' are.
    """
    if os.environ.get("ORCA_TESTS_OPTIMIZED") == "1":
        return []
    flags = ["--xla_backend_optimization_level=0"]
    try:
        if version("jaxlib").startswith("0.10."):  # newer ones end at a flag that they do not know
            # In one piece: programs this small gain nothing from threads that compile parts of them.
            flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    except PackageNotFoundError:
        pass
    return flags


def xla_flags(n_devices: int | None = None) -> str:
    """The value of XLA_FLAGS for `n_devices` CPU devices; None: what a machine has, one."""
    devices = [] if n_devices is None else [f"{DEVICES}={n_devices}"]
    return " ".join([*quick_compile(), *devices])
