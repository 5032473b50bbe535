"""The machines of the paper's evaluation (ORCA 6), each figure with its source; none is fitted.

- Memory, bandwidth, matrix rate and links: orca_jax/planning/known_devices.py (NVIDIA's A100 data sheet,
ORCA 6).
- A minimal all-reduce, 10 us for 2 GPUs to 33.7 for 8: NCCL's ring measured on a DGX A100,
  github.com/NVIDIA/nccl-tests/issues/123.
- A step of that ring between machines, 9.6 us: NCCL 2.8's own model of itself, github.com/NVIDIA/nccl,
  src/graph/tuning.cc (`hwLat`, network, ring, Simple).
- A message from stage to stage, 8.4 us plus 9.6 over the network or 3.4 over NVLink: the same file
  (`baseLat` and `hwLat`, ring, Simple).
- From one kernel to the next in its stream, 0.9 us: kernels of 2.9 us ran every 3.8 us with their launches
  hidden (A. Gray, "Getting Started with CUDA Graphs", NVIDIA's developer blog, 2019, on a V100).
- Kernels of a layer, 8 besides the all-reduces: norm, QKV, attention, out, norm, up, GeLU, down. ORCA 5 fuses
  each of norm, attention and GeLU into one.
- ORCA's control: nothing. It runs ahead of the work, on a separate channel (ORCA 4.1).
- FasterTransformer's control: one more message for each stage but the first, which waits for it before it
  starts, because control goes over NCCL (ORCA 4.1).

Each device has its link's whole bandwidth. All times of a device are multiplied by `slowness`, which is 1
unless it is fitted.
"""

from dataclasses import dataclass

from orca_jax.planning.known_devices import GPUS, KnownDevice

US = 1e-6
# By number of devices in a ring on one machine: seconds of an all-reduce of 8 to 128 bytes.
RING_LATENCY = {
    1: 0.0,
    2: 10.0 * US,
    3: 13.76 * US,
    4: 16.88 * US,
    5: 20.8 * US,
    6: 25.2 * US,
    7: 29.5 * US,
    8: 33.7 * US,
}
RING_STEP_BETWEEN = 9.6 * US
MESSAGE_BASE, MESSAGE_INSIDE, MESSAGE_BETWEEN = 8.4 * US, 3.4 * US, 9.6 * US
KERNEL_GAP = 0.9 * US
KERNELS_PER_LAYER = 8
KERNELS_FIRST, KERNELS_LAST = 1, 3  # the embedding; the last norm, the head and sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Machines with one kind of device. `control_messages`: each stage waits for one before it starts."""

    device: KnownDevice = GPUS["a100-40gb"]
    control_messages: bool = False
    slowness: float = 1.0

    def ring_latency(self, n_devices: int) -> float:
        """Seconds of a minimal all-reduce over `n_devices`, on as few machines as possible.

        Of the ring's 2 (n - 1) steps, 2 (m - 1) are between its m machines.
        """
        if n_devices <= self.device.per_machine:
            return RING_LATENCY[n_devices]
        n_machines = -(-n_devices // self.device.per_machine)
        most = max(RING_LATENCY)
        step = RING_LATENCY[most] / (2 * (most - 1))
        n_between = 2 * (n_machines - 1)
        return step * (2 * (n_devices - 1) - n_between) + RING_STEP_BETWEEN * n_between

    def ring_rate(self, n_devices: int) -> float:
        """Bytes per second that a device in such a ring sends, by the slowest link."""
        return self.device.inside if n_devices <= self.device.per_machine else self.device.between

    def same_machine(self, stage: int, n_devices: int) -> bool:
        """Whether stage number `stage`, from 0, begins on the machine on which the previous one ends."""
        per_machine = self.device.per_machine
        return (stage * n_devices - 1) // per_machine == stage * n_devices // per_machine

    def hop_latency(self, stage: int, n_devices: int) -> float:
        """Seconds of a minimal message to this stage from the previous one."""
        inside = self.same_machine(stage, n_devices)
        return MESSAGE_BASE + (MESSAGE_INSIDE if inside else MESSAGE_BETWEEN)

    def hop_rate(self, stage: int, n_devices: int) -> float:
        """Bytes per second that each device sends to this stage."""
        return self.device.inside if self.same_machine(stage, n_devices) else self.device.between
