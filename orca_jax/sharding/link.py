"""Moves hidden states between stages in separate processes (ORCA 4.1: data apart from control).

With TransferLink the processes are independent: each can die and be restarted. A stage offers its hidden
states under a key, and the next stage pulls them; whichever comes first waits for the other.

With CollectiveLink all stages are processes of one `jax.distributed` job, and each device sends to its
counterpart over NCCL. The job fails as a whole: after the loss of one worker all workers must restart.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import transfer

from orca_jax.errors import ConfigError
from orca_jax.sharding.device_group import DeviceGroup


class ProcessLink(Protocol):
    """One stage's links to the previous and the next stage, which are other processes.

    No method waits. A key is (epoch, iteration, offering stage). `address` is passed to the next stage's
    process. If the link does not outlive a loss, its process must restart after a worker's loss.
    """

    address: str
    outlives_a_loss: bool

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Make an iteration's hidden states [T, H] available to the next stage; returns their bytes."""
        ...

    def connect(self, address: str) -> None:
        """Use this address of the previous stage in the new epoch."""
        ...

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Receive the previous stage's hidden states; `like` has their shape, dtype and sharding."""
        ...


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


class TransferLink:
    """A stage's links to both neighbours; `address` is where it offers.

    `host` is the address at which the next stage's process reaches this one. Hidden states cross the link
    once, between the first devices of both groups, and are then copied to the other devices. No method waits.
    If a neighbour is gone, the use of a pulled array fails; if the neighbour hangs, so does the use. Raises
    ConfigError if it cannot listen on `host`.
    """

    outlives_a_loss = True

    def __init__(self, group: DeviceGroup, *, host: str) -> None:
        self._group = group
        at = f"[{host}]:0" if ":" in host else f"{host}:0"
        client = group.devices[0].client
        try:
            self._server = transfer.start_transfer_server(client, at, [at])
        except Exception as error:  # XLA raises several kinds
            message = f"the data plane cannot listen on {at}: {error}; choose another --data-host"
            raise ConfigError(message) from error
        self.address: str = self._server.address()
        self._connection: transfer.TransferConnection | None = None

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Let the next stage pull an iteration's hidden states [T, H]; returns their bytes.

        `key` is (epoch, iteration, stage), with the stage that offers.
        """
        first = hidden.addressable_shards[0].data  # each device has the whole
        self._server.await_pull(_number(key), [first])
        return first.nbytes

    def connect(self, address: str) -> None:
        """Pull from the previous stage at this address from now on; always opens a new connection."""
        self._connection = self._server.connect(address)

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Receive an iteration's hidden states; the array is ready once they have arrived.

        `key` is that of the offer; `like` has the shape, dtype and sharding.
        """
        assert self._connection is not None, "connect comes first"
        place = jax.sharding.SingleDeviceSharding(self._group.devices[0])
        (first,) = self._connection.pull(
            _number(key), [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)]
        )
        return first if len(self._group) == 1 else jax.device_put(first, like.sharding)


def _number(key: tuple[int, int, int]) -> int:
    """Hash a key to the transfer library's 64 bits."""
    digest = hashlib.blake2b(struct.pack("<QQQ", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
