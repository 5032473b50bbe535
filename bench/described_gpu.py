"""GPUs that need not be there: XLA compiles for their description where the CUDA plugin is installed."""

from typing import Literal

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.sharding.device_group import Device

GPU = Literal["a100-40gb", "h200"]

# The public data sheets, in the form of XLA's GpuTargetConfigProto.
_ALIKE = """
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536  shared_memory_per_block: 49152
"""
_GPUS: dict[GPU, str] = {
    "a100-40gb": """
  shared_memory_per_core: 167936  shared_memory_per_block_optin: 166912
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
  memory_bandwidth: 1555000000000  device_memory_size: 42949672960  l2_cache_size: 41943040
  cuda_compute_capability { major: 8 }""",
    "h200": """
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000  device_memory_size: 150754820096  l2_cache_size: 62914560
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }""",
}
MEMORY: dict[GPU, int] = {"a100-40gb": 42949672960, "h200": 150754820096}  # bytes, as described above


def described_devices(kind: GPU, n: int) -> list[Device]:
    """`n` GPUs of one machine, for which programs can be compiled and not run."""
    topology = topologies.get_topology_desc(
        kind,
        platform="cuda",
        topology=f"1x1x{n}",
        target_config=f"gpu_device_info {{ {_ALIKE} {_GPUS[kind]} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 13 minor: 0 }\n"
        f'device_description_str: "NVIDIA {kind.upper()}"\n',
    )
    return list(topology.devices)


def on_h200() -> NamedSharding:
    """Where arguments of a program for one H200 are said to lie."""
    return NamedSharding(Mesh(np.array(described_devices("h200", 1)), ("device",)), PartitionSpec())
