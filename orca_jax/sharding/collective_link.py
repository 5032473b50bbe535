"""Sends hidden states between stages in separate processes over NCCL: a device_put across processes.

All stages are processes of one `jax.distributed` job. Each device sends to its counterpart, over NVLink or
InfiniBand. The job fails as a whole: after the loss of one worker all workers must restart.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.errors import ConfigError
from orca_jax.sharding.device_group import DeviceGroup

_CONNECT_SECONDS = 300


def join_job(coordinator: str, *, stage: int, n_stages: int) -> None:
    """Join the job, and wait for the other processes; the first stage's process listens at `coordinator`.

    Call it before any other use of JAX. Raises ConfigError if the processes do not connect.
    """
    try:
        jax.distributed.initialize(coordinator, n_stages, stage, initialization_timeout=_CONNECT_SECONDS)
    except RuntimeError as error:
        message = f"the workers did not connect through --coordinator {coordinator}: {error}"
        raise ConfigError(message) from error


class CollectiveLink:
    """A stage's links to both neighbours; all stages must run the same iterations in the same order.

    `devices` are all devices of the job. Raises ConfigError if JAX cannot transfer between them.
    """

    address = ""
    outlives_a_loss = False

    def __init__(self, group: DeviceGroup, devices: Sequence[Any], *, stage: int, n_stages: int) -> None:
        if not getattr(group.devices[0].client, "supports_cross_host_transfers", False):
            raise ConfigError(
                f"link is 'nccl', but {group.devices[0].device_kind} devices have none; leave --link out"
            )
        self._group = group
        self._before = _group_of(stage - 1, len(group), devices) if stage else None
        self._after = _group_of(stage + 1, len(group), devices) if stage + 1 < n_stages else None
        self._meet()

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Send an iteration's hidden states [T, H]; returns the bytes sent by all devices."""
        assert self._after is not None
        jax.device_put(hidden, self._after.place())
        return hidden.nbytes * len(self._group)

    def connect(self, address: str) -> None:
        """Does nothing: the job is already connected."""

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Receive an iteration's hidden states onto this stage's devices."""
        assert self._before is not None
        # This process's view of the sender's array, of which it holds no part.
        sent = jax.make_array_from_single_device_arrays(
            like.shape, self._before.place(), [], dtype=like.dtype
        )
        return jax.device_put(sent, self._group.place())

    def _meet(self) -> None:
        """Open the connections now: it takes seconds, too long for an iteration."""
        first = (0, 0, 0)
        if self._after is not None:
            self.offer(first, jax.device_put(jnp.zeros((1, 1)), self._group.place()))
        if self._before is not None:
            self.pull(first, jax.ShapeDtypeStruct((1, 1), jnp.float32)).block_until_ready()


def _group_of(stage: int, n_devices: int, devices: Sequence[Any]) -> DeviceGroup:
    """The devices of the process that runs this stage."""
    return DeviceGroup(tuple([d for d in devices if d.process_index == stage][:n_devices]))
