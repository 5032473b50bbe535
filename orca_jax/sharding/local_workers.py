"""The workers of one process as the engine master sees them."""

from orca_jax.batch_sizes import BatchSizes
from orca_jax.control import ControlMessage, MakeWords
from orca_jax.sharding.token_chooser import DeviceTokens
from orca_jax.sharding.worker import Worker


class LocalWorkers:
    """All stages, each of which knows the one behind it; a batch is laid out once for all of them."""

    def __init__(self, first: Worker, sizes: BatchSizes) -> None:
        self.first = first
        self._sizes = sizes

    def issue(self, message: ControlMessage, words: MakeWords) -> DeviceTokens:
        """engine_master.Worker."""
        return self.first.issue(message, self._sizes.lay_out(message), words)
