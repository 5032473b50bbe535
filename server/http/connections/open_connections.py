"""Counts open HTTP connections, in total and per client address, and enforces both limits."""

from collections import Counter

from server.errors import TooManyConnections, TooManyFromAddress
from server.process.addresses import network_of


class OpenConnections:
    """The count of one server's connections. Not thread-safe."""

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._n = 0
        self._of_network = Counter[str]()

    def take(self, host: str) -> "Place":
        """Count one more connection from this address.

        Raises TooManyFromAddress or TooManyConnections without counting it.
        """
        network = network_of(host)
        if self._of_network[network] >= self._most_per_address:
            raise TooManyFromAddress(
                f"your address has {self._most_per_address} connections open, as many as it may have; reuse "
                "connections or close some (orca serve --max-connections-per-address)"
            )
        if self._n >= self._most:
            raise TooManyConnections(
                f"the server has {self._most} connections open, as many as it takes; try again later "
                "(orca serve --max-connections)"
            )
        self._n += 1
        self._of_network[network] += 1
        return Place(self, network)

    def release(self, network: str) -> None:
        """Stop counting one connection from this network."""
        self._n -= 1
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]  # so that the table does not grow with every address ever seen


class Place:
    """One connection's entry in the count, until `release`, which may be called more than once."""

    __slots__ = ("_connections", "_held", "network")

    def __init__(self, connections: OpenConnections, network: str) -> None:
        self.network = network  # of the client's address
        self._connections = connections
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._connections.release(self.network)
