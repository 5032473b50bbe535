"""GPUs that need not be present: XLA compiles for their description if the CUDA plugin is installed."""

from dataclasses import dataclass

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.planning.known_devices import GPUS
from orca_jax.sharding.device_group import Device


@dataclass(frozen=True, slots=True)
class _Generation:
    """Properties that GPUs of one generation share."""

    text: str  # of XLA's GpuTargetConfigProto
    l2_cache: dict[str, int]


# From public data sheets and NVIDIA's tuning guides; a block may use 1 KiB less shared memory than a core
# has. The versions are the oldest that JAX's CUDA 13 plugin supports: without them XLA assumes a driver that
# cannot record library calls and custom calls in CUDA graphs, and leaves these outside its command buffers.
_ALIKE = """
  threads_per_block_limit: 1024  threads_per_warp: 32
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  shared_memory_per_block: 49152
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
"""
# `active_links` are NVLinks to the machine's other GPUs: XLA uses them to decide whether small all-reduces
# use its own kernels.
_GENERATIONS = (
    _Generation(
        """
  threads_per_core_limit: 2048  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  cuda_compute_capability { major: 8 }  device_interconnect_info { active_links: 12 }""",
        {"a100-40gb": 41943040, "a100-80gb": 41943040},
    ),
    _Generation(
        """
  threads_per_core_limit: 1536  shared_memory_per_core: 102400  shared_memory_per_block_optin: 101376
  core_count: 142  fpus_per_core: 128  clock_rate_ghz: 2.52
  cuda_compute_capability { major: 8 minor: 9 }""",
        {"l40s": 100663296},
    ),
    _Generation(
        """
  threads_per_core_limit: 2048  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_interconnect_info { active_links: 18 }""",
        {"h100": 52428800, "h200": 62914560},
    ),
    _Generation(
        """
  threads_per_core_limit: 2048  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 148  fpus_per_core: 128  clock_rate_ghz: 1.965
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  device_interconnect_info { active_links: 18 }""",
        {"b200": 132644864},
    ),
)


def described_devices(kind: str, n: int) -> list[Device]:
    """`n` GPUs of one machine, for which programs can be compiled but not run."""
    (generation,) = (each for each in _GENERATIONS if kind in each.l2_cache)
    known = GPUS[kind]
    memory = (
        f"memory_bandwidth: {known.bandwidth:.0f}  device_memory_size: {known.memory}  "
        f"l2_cache_size: {generation.l2_cache[kind]}"
    )
    topology = topologies.get_topology_desc(
        kind,
        platform="cuda",
        topology=f"1x1x{n}",
        target_config=f"gpu_device_info {{ {_ALIKE} {memory} {generation.text} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 13 minor: 0 }\n"
        f'device_description_str: "NVIDIA {kind.upper()}"\n',
    )
    return list(topology.devices)


def on_h200() -> NamedSharding:
    """The sharding of arguments of a program compiled for one described H200."""
    return NamedSharding(Mesh(np.array(described_devices("h200", 1)), ("device",)), PartitionSpec())
