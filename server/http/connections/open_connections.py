"""How many HTTP connections are open, in all and from each address, and whether one more may be."""

from collections import Counter

from server.errors import TooManyConnections, TooManyFromAddress
from server.process.addresses import network_of


class OpenConnections:
    """The count of one server's connections, for one thread."""

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._n = 0
        self._of_network = Counter[str]()

    def take(self, host: str) -> "Place":
        """Count one more from this address.

        Raises TooManyFromAddress or TooManyConnections, and counts nothing then.
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
        """One from this network is closed."""
        self._n -= 1
        self._of_network[network] -= 1
        if not self._of_network[network]:
            del self._of_network[network]  # or the table would grow with every address ever seen


class Place:
    """One connection's part of the count, until `release`, which may be called again."""

    __slots__ = ("_held", "_of", "network")

    def __init__(self, of: OpenConnections, network: str) -> None:
        self.network = network  # of the client's address
        self._of = of
        self._held = True

    def release(self) -> None:
        """The connection is closed."""
        if self._held:
            self._held = False
            self._of.release(self.network)
