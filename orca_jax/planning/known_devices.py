"""The devices that `orca plan` knows by name: what each can do, and where that is written.

Figures are the data sheets', for dense matrices. A real device stays below its sheet, so a floor that is
computed from these is lower than one from measured rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orca_jax.config import Attention, Dtype
from orca_jax.errors import ConfigError
from orca_jax.planning.cost_model import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownDevice:
    """One device. `memory` is in bytes; `bandwidth` to it, and the links, are in bytes a second.

    `matrix_rates` are floating-point operations a second by dtype. `inside` is what one device can send to
    the others of its machine, `between` what it can send to another machine, each in one direction; a machine
    has `per_machine` of them. `attention` is what runs there (execution/attention_backend.py chooses it).
    """

    name: str
    memory: int
    bandwidth: float
    matrix_rates: Mapping[Dtype, float]
    inside: float
    between: float
    per_machine: int
    attention: Attention

    def rates(self, dtype: Dtype) -> Device:
        """For the cost model."""
        return Device(bandwidth=self.bandwidth, matrix_rate=self.matrix_rates[dtype])


# NVIDIA A100 Tensor Core GPU data sheet (1758950-r4), SXM: 1,555 GB/s (40 GB) and 2,039 GB/s (80 GB); 312
# TFLOPS in bfloat16 and float16, 156 in TF32, which is how XLA multiplies float32 by default; NVLink 600 GB/s
# both ways together. Azure's ND A100 v4, the machine of ORCA 6: eight of them and eight 200 Gb/s links
# of HDR InfiniBand, one for each GPU.
_AMPERE: Mapping[Dtype, float] = {"bfloat16": 312e12, "float16": 312e12, "float32": 156e12}
# NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM: 3.35 and 4.8 TB/s; 989.5 TFLOPS in bfloat16 and
# float16 and 494.7 in TF32 (the sheets' 1,979 and 989 are with sparsity); NVLink 900 GB/s both ways together.
# NVIDIA DGX H100/H200: eight GPUs, a 400 Gb/s ConnectX-7 for each.
_HOPPER: Mapping[Dtype, float] = {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 494.7e12}
# NVIDIA L40S data sheet: 864 GB/s; 362.05 TFLOPS in bfloat16 and float16 and 183 in TF32; no NVLink, PCIe 4.0
# with 64 GB/s both ways together. NVIDIA's reference architecture 2-8-5-200: eight GPUs, 200 Gb/s for each.
_ADA: Mapping[Dtype, float] = {"bfloat16": 362.05e12, "float16": 362.05e12, "float32": 183e12}
# NVIDIA HGX and DGX B200 data sheets, of eight GPUs: 64 TB/s; for one 2.25 PFLOPS in bfloat16 and float16 and
# 1.1 in TF32 (the sheets' 4.5 and 2.2 are with sparsity); NVLink 1.8 TB/s both ways together; a 400 Gb/s
# ConnectX-7 for each.
_BLACKWELL: Mapping[Dtype, float] = {"bfloat16": 2250e12, "float16": 2250e12, "float32": 1100e12}

GPUS: Mapping[str, KnownDevice] = {
    "a100-40gb": KnownDevice(
        name="a100-40gb",
        memory=40 << 30,
        bandwidth=1555e9,
        matrix_rates=_AMPERE,
        inside=300e9,
        between=25e9,
        per_machine=8,
        attention="cudnn",
    ),
    "a100-80gb": KnownDevice(
        name="a100-80gb",
        memory=80 << 30,
        bandwidth=2039e9,
        matrix_rates=_AMPERE,
        inside=300e9,
        between=25e9,
        per_machine=8,
        attention="cudnn",
    ),
    "l40s": KnownDevice(
        name="l40s",
        memory=46_068 << 20,  # 48 GB on the sheet, less what its error correction takes
        bandwidth=864e9,
        matrix_rates=_ADA,
        inside=32e9,
        between=25e9,
        per_machine=8,
        attention="cudnn",
    ),
    "h100": KnownDevice(
        name="h100",
        memory=80 << 30,
        bandwidth=3350e9,
        matrix_rates=_HOPPER,
        inside=450e9,
        between=50e9,
        per_machine=8,
        attention="kernel",
    ),
    "h200": KnownDevice(
        name="h200",
        memory=150_754_820_096,  # 141 GB on the sheet: 140.4 GiB, as its driver counts them
        bandwidth=4800e9,
        matrix_rates=_HOPPER,
        inside=450e9,
        between=50e9,
        per_machine=8,
        attention="kernel",
    ),
    "b200": KnownDevice(
        name="b200",
        memory=183_359 << 20,  # 180 GB on the sheet: 179 GiB, as its driver counts them
        bandwidth=8000e9,
        matrix_rates=_BLACKWELL,
        inside=900e9,
        between=50e9,
        per_machine=8,
        attention="cudnn",
    ),
}
CPU = "cpu"

# What an engine takes unless somebody says more or less: of a GPU's memory this share, for CUDA, NCCL and the
# programs themselves need some too; of a CPU's, which others need, so much for keys and values in all.
MEMORY_FRACTION = 0.9
MODEST_KV_BYTES = 2 << 30


def cpu_device(*, memory: int, bandwidth: float, matrix_rate: float) -> KnownDevice:
    """This machine's CPU, of which somebody measured the rates, in whatever dtype.

    Its parts and stages share its memory and its cores: links cost what the memory does.
    """
    return KnownDevice(
        name=CPU,
        memory=memory,
        bandwidth=bandwidth,
        matrix_rates={"float32": matrix_rate, "bfloat16": matrix_rate, "float16": matrix_rate},
        inside=bandwidth,
        between=bandwidth,
        per_machine=1,
        attention="follow_lengths",
    )


def gpu_named(name: str) -> KnownDevice:
    """The GPU of that name. Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError(f"device is {name!r}; it must be one of {', '.join([*GPUS, CPU])}")
    return GPUS[name]
