"""Keeps responses for a while, so that a request can continue one; bounded in number and in bytes."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.errors import UnknownResponse

_OVERHEAD = 1024  # bytes of an entry besides its texts, at most
_ID_BYTES = 256  # of an item id in the response and in the index, besides its characters, at most
_LARGEST = 4  # one response may take one part in so many of all bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation that ends with it, both as JSON.

    `items` has all items of the conversation; the model read the first `n_input` of them. `item_ids` has the
    ids of all.
    """

    response_id: str
    tenant: str
    owner: str
    response: bytes
    items: bytes
    n_input: int
    item_ids: Sequence[str] = ()

    @property
    def n_bytes(self) -> int:
        """The bytes of memory that the entry takes, at most."""
        names = len(self.response_id) + len(self.tenant) + len(self.owner)
        ids = 4 * sum(map(len, self.item_ids)) + _ID_BYTES * len(self.item_ids)
        return len(self.response) + len(self.items) + ids + 4 * names + _OVERHEAD


@dataclass(slots=True)
class _Share:
    """An owner's entries, the oldest first."""

    entries: OrderedDict[str, StoredResponse]
    n_bytes: int = 0


class ResponseStore:
    """Holds at most `max_responses` responses of at most `max_bytes` together, each for at most `seconds`.

    A tenant finds only its own responses. When the store is full, the owner with the most loses its oldest
    one; an owner with at most an equal share of the store thus loses nothing to others. For one thread;
    nothing here takes long. `now` is a clock in seconds.
    """

    def __init__(
        self, *, max_responses: int, max_bytes: int, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._now = now
        self._entries: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # oldest first
        self._shares: dict[str, _Share] = {}
        self._by_item: dict[tuple[str, str], str] = {}  # tenant and item: the last response that has it
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_off(self) -> bool:
        """Whether the server stores no responses."""
        return self._max_responses == 0

    @property
    def largest(self) -> int:
        """The most bytes of one response with its conversation."""
        return max(self._max_bytes // _LARGEST - _OVERHEAD, 0)

    def put(self, entry: StoredResponse) -> bool:
        """Store a response and drop others to make room. False if it is too large to store."""
        self._drop_expired()
        if self.is_off or entry.n_bytes > self._max_bytes // _LARGEST:
            return False
        self._entries[entry.response_id] = self._now() + self._seconds, entry
        share = self._shares.setdefault(entry.owner, _Share(OrderedDict()))
        share.entries[entry.response_id] = entry
        share.n_bytes += entry.n_bytes
        self.n_bytes += entry.n_bytes
        for item_id in entry.item_ids:
            self._by_item[entry.tenant, item_id] = entry.response_id
        while len(self._entries) > self._max_responses:
            self._drop_oldest(max(self._shares.values(), key=lambda share: len(share.entries)))
        while self.n_bytes > self._max_bytes:
            self._drop_oldest(max(self._shares.values(), key=lambda share: share.n_bytes))
        return entry.response_id in self._entries

    def get(self, response_id: str, tenant: str, *, param: str) -> StoredResponse:
        """The response with this id. Raises UnknownResponse, which names `param`."""
        self._drop_expired()
        found = self._entries.get(response_id)
        if found is None or found[1].tenant != tenant:
            message = (
                f"there is no response {response_id[:80]!r}; it was not stored, has expired, or was dropped"
            )
            raise UnknownResponse(f"{message} to make room for others", param=param)
        return found[1]

    def holding(self, item_id: str, tenant: str, *, param: str) -> StoredResponse:
        """The tenant's last response whose conversation has the item.

        Raises UnknownResponse, which names `param`, if there is none.
        """
        self._drop_expired()
        response_id = self._by_item.get((tenant, item_id))
        if response_id is None:
            message = f"there is no item {item_id[:80]!r}; its response was not stored, has expired, or was "
            raise UnknownResponse(
                f"{message}dropped to make room for others; send the item itself", param=param
            )
        return self._entries[response_id][1]

    def delete(self, response_id: str, tenant: str, *, param: str) -> None:
        """Drop the response. Raises UnknownResponse."""
        self._drop(self.get(response_id, tenant, param=param))

    def _drop_expired(self) -> None:
        now = self._now()
        while self._entries:
            expires, entry = next(iter(self._entries.values()))
            if expires > now:
                break
            self._drop(entry)

    def _drop_oldest(self, share: _Share) -> None:
        self._drop(next(iter(share.entries.values())))

    def _drop(self, entry: StoredResponse) -> None:
        del self._entries[entry.response_id]
        self.n_bytes -= entry.n_bytes
        for item_id in entry.item_ids:
            if self._by_item.get((entry.tenant, item_id)) == entry.response_id:
                del self._by_item[entry.tenant, item_id]
        share = self._shares[entry.owner]
        del share.entries[entry.response_id]
        share.n_bytes -= entry.n_bytes
        if not share.entries:
            del self._shares[entry.owner]
