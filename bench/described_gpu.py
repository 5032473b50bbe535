"""An H200 that need not be there: XLA compiles for its description where the CUDA plugin is installed."""

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The H200's public data sheet, in the form of XLA's GpuTargetConfigProto.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000  device_memory_size: 150754820096  l2_cache_size: 62914560
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


def on_h200() -> NamedSharding:
    """Where arguments of a program for one H200 are said to lie."""
    topology = topologies.get_topology_desc("h200", platform="cuda", topology="1x1x1", target_config=_H200)
    return NamedSharding(Mesh(np.array(topology.devices), ("device",)), PartitionSpec())
