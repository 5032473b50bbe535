"""The LoRA adapters that are on the devices: a request waits until its adapter is, and keeps it there.

Devices have room for a number of adapters, in slots. An adapter is read on a thread, from the host's memory
or from disk, and put into a slot between two iterations; meanwhile all others run on. Of those that nobody
wants, the least recently used one makes room. If all are wanted, the one with the fewest admitted requests
admits no more until it is free, so that no adapter keeps another one out for ever. Few do so at a time: a
flood of requests for other adapters does not stop those of the adapters that are there.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

from orca_jax.errors import AdapterFailed
from orca_jax.request.adapter import NOWHERE, Adapter
from orca_jax.request.request import Request
from orca_jax.scheduling.request_pool import InArrivalOrder

_CLOSING_SHARE = 4  # one in so many adapters makes room although requests want it
_MOST_COMING = (
    2  # read at a time, and with a slot: one thread reads them, and their slots are empty meanwhile
)

PutAdapter = Callable[[int], None]  # puts an adapter that was read into a slot


class AdapterStore(Protocol):
    """The adapters that an engine knows, most of them outside of its devices. For any thread."""

    @property
    def generation(self) -> int:
        """Counts how often the devices have lost all adapters; it changes on the scheduler's thread alone."""
        ...

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may choose, by name."""
        ...

    def add(self, name: str, directory: str, *, replace: bool = False) -> Adapter:
        """Read an adapter and let requests choose it; `replace` allows a name that there is already.

        Raises ConfigError or a CheckpointError.
        """
        ...

    def update(self, name: str, weights: object, *, scale: float) -> Adapter:
        """Replace an adapter, or add it, by a trainer's arrays, which are copied; see `LLM.update_weights`.

        Raises ConfigError or a CheckpointError.
        """
        ...

    def remove(self, name: str) -> Adapter:
        """Let no more requests choose an adapter; those that have it go on. Raises UnknownAdapter."""
        ...

    def read(self, adapter: Adapter) -> PutAdapter:
        """Read an adapter; on a thread of its own. Raises a CheckpointError.

        The scheduler's thread calls the result, which must not wait for a device.
        """
        ...


class AdapterSlots:
    """The adapters in the slots of one engine. All methods are for the scheduler's thread.

    `thread` reads adapters, by default one of its own; `wake` is called there when one has been read.
    """

    def __init__(
        self,
        n_slots: int,
        store: AdapterStore,
        *,
        wake: Callable[[], object],
        thread: Executor | None = None,
    ) -> None:
        self._store, self._wake = store, wake
        self._slots: list[Adapter | None] = [None] * n_slots
        self._resident: OrderedDict[Adapter, None] = OrderedDict()  # least recently used first
        self._coming: dict[Adapter, tuple[int, Future[PutAdapter]]] = {}
        self._generation = store.generation
        self._misses = False  # whether an admitted request may lack its adapter, after a loss
        self._failed: dict[Adapter, Exception] = {}
        self._closing: set[Adapter] = set()  # admits no more requests, to make room
        # Of requests that the newest look, and the one before it, found ready, and that may be chosen.
        self._offered: set[Adapter] = set()
        self._offered_before: set[Adapter] = set()
        self._without_room = False  # whether the newest look wanted an adapter, and no slot could be had
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def resident(self) -> list[Adapter]:
        """The adapters on the devices."""
        return list(self._resident)

    def fill(self) -> None:
        """Put the first adapters into the slots, before the first request."""
        for slot, adapter in zip(range(len(self._slots)), self._store.adapters.values(), strict=False):
            self._store.read(adapter)(slot)
            self._slots[slot], adapter.slot = adapter, slot
            self._resident[adapter] = None

    def close(self) -> None:
        """End the thread that reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def among(self, pool: Iterable[Request]) -> Iterable[Request]:
        """The requests of `pool`, in its order, without those that wait for their adapter.

        It begins to read adapters that waiting requests need, and puts those that were read into their slots.
        """
        self._forget_lost()
        self._settle()
        if not self._without_room:
            self._closing.clear()
        self._without_room = False
        self._offered_before, self._offered = self._offered, set()
        if isinstance(pool, InArrivalOrder):
            admitted = self._with_theirs(list(pool.admitted) if self._misses else pool.admitted)

            def waiting() -> Iterator[list[Request]]:
                return self._ready(pool.waiting(), admitted)

            return InArrivalOrder(admitted, waiting, all_plain=pool.all_plain)
        every = list(pool)
        admitted = self._with_theirs([req for req in every if req.row >= 0])
        return [
            *admitted,
            *(req for some in self._ready((r for r in every if r.row < 0), admitted) for req in some),
        ]

    def lets_run_alone(self, req: Request, admitted: Iterable[Request]) -> bool:
        """Whether a request that must run alone has its adapter, which else begins to be read.

        No other request is in flight, and none runs before it: so it may take the slot of an adapter in use.
        """
        self._forget_lost()
        self._settle()
        adapter = req.adapter
        if adapter is None or adapter in self._resident:
            return True
        if adapter not in self._coming and adapter not in self._failed:
            self._begin(adapter, admitted)
            if adapter not in self._coming and self._resident:
                self._misses = True
                self._read_into(self._freed(next(iter(self._resident))), adapter)
        return False

    def take_failed(self, live: Iterable[Request]) -> list[Request]:
        """The live requests whose adapter could not be read, with the cause as their failure."""
        if not self._failed:
            return []
        failed: list[Request] = []
        for req in live:
            if req.adapter in self._failed:
                error = self._failed[req.adapter]
                req.failure, req.failure_kind = f"the adapter could not be read: {error}", AdapterFailed
                failed.append(req)
        self._failed.clear()
        return failed

    def waits(self, req: Request) -> bool:
        """Whether a waiting request waits for its adapter. For any thread."""
        return req.adapter is not None and (req.adapter not in self._resident or req.adapter in self._closing)

    def _forget_lost(self) -> None:
        """After a loss, let all adapters come again, those of admitted requests first."""
        generation = self._store.generation
        if generation == self._generation:
            return
        self._generation = generation
        for adapter in self._resident:
            adapter.slot = NOWHERE
        self._slots = [None] * len(self._slots)
        self._resident.clear()
        self._coming.clear()
        self._closing.clear()
        self._misses = True

    def _with_theirs(self, admitted: Iterable[Request]) -> Iterable[Request]:
        """The admitted requests, without those whose adapter is lost and comes again."""
        if not self._misses:
            return admitted
        lost = {req.adapter for req in admitted if req.adapter is not None} - self._resident.keys()
        self._misses = bool(lost)
        for adapter in lost:
            if adapter not in self._coming and adapter not in self._failed:
                self._begin(adapter, admitted)
        return [req for req in admitted if req.adapter not in lost]

    def _ready(self, waiting: Iterable[Request], admitted: Iterable[Request]) -> Iterator[list[Request]]:
        ready: dict[Adapter | None, bool] = {None: True}
        for req in waiting:
            adapter = req.adapter
            is_ready = ready.get(adapter)
            if is_ready is None:
                assert adapter is not None
                is_ready = ready[adapter] = self._is_ready(adapter, admitted)
            if is_ready:
                yield [req]

    def _is_ready(self, adapter: Adapter, admitted: Iterable[Request]) -> bool:
        if adapter in self._closing:
            return False
        if adapter in self._resident:
            self._resident.move_to_end(adapter)
            self._offered.add(adapter)
            return True
        # Once there is no room, a look asks for none again: there may be a thousand such adapters.
        has_room = len(self._coming) < _MOST_COMING and not self._without_room
        if has_room and adapter not in self._coming and adapter not in self._failed:
            self._begin(adapter, admitted)
        return False

    def _begin(self, adapter: Adapter, admitted: Iterable[Request]) -> None:
        """Begin to read an adapter, if there is a slot for it, or one that can be freed."""
        slot = self._room(admitted)
        if slot is None:
            self._without_room = True
            return
        self._read_into(slot, adapter)

    def _read_into(self, slot: int, adapter: Adapter) -> None:
        self._slots[slot] = adapter
        future = self._thread.submit(self._store.read, adapter)
        self._coming[adapter] = slot, future
        future.add_done_callback(lambda _: self._wake())

    def _freed(self, adapter: Adapter) -> int:
        """The slot of an adapter, which leaves it."""
        del self._resident[adapter]
        self._closing.discard(adapter)
        slot, adapter.slot = adapter.slot, NOWHERE
        return slot

    def _room(self, admitted: Iterable[Request]) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        users = Counter(req.adapter for req in admitted if req.adapter is not None)
        wanted = (self._offered | self._offered_before) - self._closing
        idle = next((one for one in self._resident if not users[one] and one not in wanted), None)
        if idle is None:
            open_ = [one for one in self._resident if one not in self._closing]
            if len(self._closing) < max(1, len(self._slots) // _CLOSING_SHARE) and open_:
                self._closing.add(min(open_, key=lambda one: users[one]))
            return None
        return self._freed(idle)

    def _settle(self) -> None:
        """Put the adapters that were read into their slots."""
        for adapter, (slot, future) in list(self._coming.items()):
            if not future.done():
                continue
            del self._coming[adapter]
            try:
                future.result()(slot)
            except Exception as error:
                self._slots[slot] = None
                self._failed[adapter] = error
                continue
            adapter.slot = slot
            self._resident[adapter] = None
