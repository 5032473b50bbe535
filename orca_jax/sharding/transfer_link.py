"""Sends hidden states between stages in separate processes, through jax.experimental.transfer.

The processes are independent: each can die and be restarted. A stage offers its hidden states under a key,
and the next stage pulls them; whichever comes first waits for the other.
"""

import hashlib
import struct

import jax
from jax.experimental import transfer

from orca_jax.errors import ConfigError
from orca_jax.sharding.device_group import DeviceGroup


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
