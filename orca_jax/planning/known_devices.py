"""The devices that `orca plan` knows by name: their figures and sources.

Figures come from data sheets, for dense matrices. A real device stays below its data sheet, so a floor
computed from these figures is lower than one from measured rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orca_jax.config import Attention, Dtype
from orca_jax.errors import ConfigError
from orca_jax.planning.cost_model import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownDevice:
    """A device. `memory` is in bytes; `bandwidth` (to that memory) and the links are in bytes/s.

    `matrix_rates` are floating-point operations/s by dtype. In one direction, a device can send `inside` to
    the other devices of its machine, `between` to another machine, and `host_link` to the host's memory; a
    machine has `per_machine` devices. `attention` is the kind that runs there (execution/attention_backend.py
    chooses it).
    """

    name: str
    memory: int
    bandwidth: float
    matrix_rates: Mapping[Dtype, float]
    inside: float
    between: float
    host_link: float
    per_machine: int
    attention: Attention

    def rates(self, dtype: Dtype) -> Device:
        """The rates for the cost model."""
        return Device(bandwidth=self.bandwidth, matrix_rate=self.matrix_rates[dtype])

    def ring_rate(self, n_devices: int) -> float:
        """Bytes/s that each of `n_devices` sends in rings: there is one through each network link."""
        if n_devices <= self.per_machine:
            return self.inside
        return min(self.inside, self.per_machine * self.between)


# NVIDIA A100 Tensor Core GPU data sheet (1758950-r4), SXM: 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB); 312
# TFLOPS in bfloat16 and float16, 156 in TF32, XLA's default for float32; NVLink 600 GB/s in both directions
# together, PCIe 4.0 64 GB/s. Azure's ND A100 v4, the machine of ORCA 6: eight GPUs, each with a 200 Gb/s link
# of HDR InfiniBand.
_AMPERE: Mapping[Dtype, float] = {"bfloat16": 312e12, "float16": 312e12, "float32": 156e12}
# NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM: 3.35 and 4.8 TB/s; 989.5 TFLOPS in bfloat16 and
# float16 and 494.7 in TF32 (the sheets' 1,979 and 989 are with sparsity); NVLink 900 GB/s in both directions
# together, PCIe 5.0 128 GB/s. NVIDIA DGX H100/H200: eight GPUs, a 400 Gb/s ConnectX-7 for each.
_HOPPER: Mapping[Dtype, float] = {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 494.7e12}
# NVIDIA L40S data sheet: 864 GB/s; 362.05 TFLOPS in bfloat16 and float16 and 183 in TF32; no NVLink, PCIe 4.0
# with 64 GB/s in both directions together. NVIDIA's reference architecture 2-8-5-200: eight GPUs, each with
# 200 Gb/s.
_ADA: Mapping[Dtype, float] = {"bfloat16": 362.05e12, "float16": 362.05e12, "float32": 183e12}
# NVIDIA HGX and DGX B200 data sheets, of eight GPUs: 64 TB/s; for one 2.25 PFLOPS in bfloat16 and float16 and
# 1.1 in TF32 (the sheets' 4.5 and 2.2 are with sparsity); NVLink 1.8 TB/s in both directions together, PCIe
# 5.0 128 GB/s; a 400 Gb/s ConnectX-7 for each.
_BLACKWELL: Mapping[Dtype, float] = {"bfloat16": 2250e12, "float16": 2250e12, "float32": 1100e12}

_A100 = KnownDevice(
    name="a100-40gb",
    memory=40 << 30,
    bandwidth=1555e9,
    matrix_rates=_AMPERE,
    inside=300e9,
    between=25e9,
    host_link=32e9,
    per_machine=8,
    attention="cudnn",
)
_L40S = KnownDevice(
    name="l40s",
    memory=46_068 << 20,  # 48 GB on the sheet, less what its error correction takes
    bandwidth=864e9,
    matrix_rates=_ADA,
    inside=32e9,
    between=25e9,
    host_link=32e9,
    per_machine=8,
    attention="cudnn",
)
_H100 = KnownDevice(
    name="h100",
    memory=80 << 30,
    bandwidth=3350e9,
    matrix_rates=_HOPPER,
    inside=450e9,
    between=50e9,
    host_link=64e9,
    per_machine=8,
    attention="kernel",
)
_B200 = KnownDevice(
    name="b200",
    memory=183_359 << 20,  # 180 GB on the sheet: 179 GiB, as its driver counts them
    bandwidth=8000e9,
    matrix_rates=_BLACKWELL,
    inside=900e9,
    between=50e9,
    host_link=64e9,
    per_machine=8,
    attention="cudnn",
)
_LARGER_A100 = replace(_A100, name="a100-80gb", memory=80 << 30, bandwidth=2039e9)
# 141 GB on the sheet: 140.4 GiB, as its driver counts them
_H200 = replace(_H100, name="h200", memory=150_754_820_096, bandwidth=4800e9)

GPUS: Mapping[str, KnownDevice] = {
    each.name: each for each in (_A100, _LARGER_A100, _L40S, _H100, _H200, _B200)
}
CPU = "cpu"

# Defaults of what an engine may use: a fraction of a GPU's memory, because CUDA, NCCL and the programs need
# the rest; on a CPU, whose memory other processes need, a fixed number of bytes for the whole KV cache.
MEMORY_FRACTION = 0.9
MODEST_KV_BYTES = 2 << 30


def cpu_device(*, memory: int, bandwidth: float, matrix_rate: float) -> KnownDevice:
    """Describe this machine's CPU by measured rates, used for every dtype.

    All stages and shards share its memory and cores, so a link is as fast as the memory.
    """
    return KnownDevice(
        name=CPU,
        memory=memory,
        bandwidth=bandwidth,
        matrix_rates={"float32": matrix_rate, "bfloat16": matrix_rate, "float16": matrix_rate},
        inside=bandwidth,
        between=bandwidth,
        host_link=bandwidth,
        per_machine=1,
        attention="follow_lengths",
    )


def gpu_like(device: str) -> KnownDevice | None:
    """The GPU that JAX or a driver calls `device`, such as "NVIDIA A100-SXM4-80GB"; None for an unknown one.

    `device` must contain the name of the model. Its memory size distinguishes two variants of one model.
    """
    device = device.lower()
    alike = [name for name in GPUS if name.split("-")[0] in device]
    if not alike:
        return None
    return GPUS[max(alike, key=lambda name: sum(part in device for part in name.split("-")))]


def gpu_named(name: str) -> KnownDevice:
    """Raises ConfigError for an unknown name."""
    if name not in GPUS:
        raise ConfigError(f"device is {name!r}; it must be one of {', '.join([*GPUS, CPU])}")
    return GPUS[name]
