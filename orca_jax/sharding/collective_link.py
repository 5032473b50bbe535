"""Hidden states from a stage's process to the next one's by NCCL: a device_put across processes.

All stages are processes of one `jax.distributed` job. Each device sends to its counterpart, over NVLink or
InfiniBand. The job stands and falls as a whole: after the loss of one worker all of them must start again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.errors import ConfigError
from orca_jax.sharding.device_group import DeviceGroup

_CONNECT_SECONDS = 300


def join_job(coordinator: str, *, stage: int, n_stages: int) -> None:
    """Become a process of the job; waits for all others. The first stage's process is at `coordinator`.

    Before JAX is used for anything else. Raises ConfigError where they do not come together.
    """
    try:
        jax.distributed.initialize(coordinator, n_stages, stage, initialization_timeout=_CONNECT_SECONDS)
    except RuntimeError as error:
        message = f"the workers did not come together at --coordinator {coordinator}: {error}"
        raise ConfigError(message) from error


class CollectiveLink:
    """A stage's end of the links to both of its neighbours, which take part in the same order of iterations.

    `devices` are those of the whole job. Raises ConfigError where JAX cannot do this between them.
    """

    address = ""
    outlives_a_loss = False

    def __init__(self, group: DeviceGroup, devices: Sequence[Any], *, stage: int, n_stages: int) -> None:
        if not getattr(group.devices[0].client, "supports_cross_host_transfers", False):
            raise ConfigError(
                f"link is 'nccl', and {group.devices[0].device_kind} devices have none; leave --link out"
            )
        self._group = group
        self._before = _group_of(stage - 1, len(group), devices) if stage else None
        self._behind = _group_of(stage + 1, len(group), devices) if stage + 1 < n_stages else None
        self._meet()

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Send an iteration's hidden states [T, H]; gives the bytes, of all devices together."""
        assert self._behind is not None
        jax.device_put(hidden, self._behind.place())
        return hidden.nbytes * len(self._group)

    def connect(self, address: str) -> None:
        """Nothing: the job is connected."""

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Receive an iteration's hidden states onto this stage's devices."""
        assert self._before is not None
        # As this process sees it: an array of which it holds no part.
        theirs = jax.make_array_from_single_device_arrays(
            like.shape, self._before.place(), [], dtype=like.dtype
        )
        return jax.device_put(theirs, self._group.place())

    def _meet(self) -> None:
        """Have the connections made, which takes seconds that no iteration has."""
        first = (0, 0, 0)
        if self._behind is not None:
            self.offer(first, jax.device_put(jnp.zeros((1, 1)), self._group.place()))
        if self._before is not None:
            self.pull(first, jax.ShapeDtypeStruct((1, 1), jnp.float32)).block_until_ready()


def _group_of(stage: int, n_devices: int, devices: Sequence[Any]) -> DeviceGroup:
    """The devices of the process that has this stage."""
    return DeviceGroup(tuple([d for d in devices if d.process_index == stage][:n_devices]))
