"""Hidden states from a stage's process to the next one's, by jax.experimental.transfer.

The processes are independent of each other: each may die and come back. A stage offers its hidden states
under a key, the next one pulls them; whichever comes first waits for the other.
"""

import hashlib
import struct

import jax
from jax.experimental import transfer

from orca_jax.errors import ConfigError
from orca_jax.sharding.device_group import DeviceGroup


class TransferLink:
    """A stage's end of the links to both of its neighbours; `address` is where it offers.

    `host` is the address that the next stage's process reaches this one by. Hidden states cross the link
    once, from the first device of a group to the first of the next, and are copied to its others there.
    Nothing here waits; where a neighbour is gone, what was pulled fails when it is used, and where it hangs
    it hangs. Raises ConfigError for a host that cannot be had.
    """

    outlives_a_loss = True

    def __init__(self, group: DeviceGroup, *, host: str) -> None:
        self._group = group
        at = f"[{host}]:0" if ":" in host else f"{host}:0"
        client = group.devices[0].client
        try:
            self._server = transfer.start_transfer_server(client, at, [at])
        except Exception as error:  # XLA's own, of several kinds
            message = f"the data plane cannot listen on {at}: {error}; choose another --data-host"
            raise ConfigError(message) from error
        self.address: str = self._server.address()
        self._connection: transfer.TransferConnection | None = None

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Let the next stage pull an iteration's hidden states [T, H]; gives their bytes.

        `key` is (epoch, iteration, stage), the stage that offers.
        """
        first = hidden.addressable_shards[0].data  # each device has the whole
        self._server.await_pull(_number(key), [first])
        return first.nbytes

    def connect(self, address: str) -> None:
        """Pull from the stage before at this address from now on; a new connection each time."""
        self._connection = self._server.connect(address)

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """An iteration's hidden states on this stage's devices, once they are there.

        `key` is the one that they are offered under, `like` says their shape, dtype and place.
        """
        assert self._connection is not None, "connect comes first"
        place = jax.sharding.SingleDeviceSharding(self._group.devices[0])
        (first,) = self._connection.pull(
            _number(key), [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)]
        )
        return first if len(self._group) == 1 else jax.device_put(first, like.sharding)


def _number(key: tuple[int, int, int]) -> int:
    """The transfer's own key is a number of 64 bits; one that differs in any part is another."""
    digest = hashlib.blake2b(struct.pack("<QQQ", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
