"""The LoRA adapters that are on the devices: a request waits until its adapter is, and keeps it there.

Devices have room for a number of adapters, in slots. An adapter is read on a thread, from the host's memory
or from disk, and put into a slot between two iterations; meanwhile all others run on. Of those that no
admitted request uses, the least recently used one makes room. If all are in use, the one with the fewest
admitted requests admits no more until it is free, so that no adapter keeps another one out for ever.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

from orca_jax.errors import AdapterFailed
from orca_jax.request.adapter import NOWHERE, Adapter
from orca_jax.request.request import Request
from orca_jax.scheduling.request_pool import InArrivalOrder

_MOST_PASSED = 256  # waiting requests without their adapter that one look passes over

PutAdapter = Callable[[int], None]  # puts an adapter that was read into a slot


class AdapterStore(Protocol):
    """The adapters that an engine knows, most of them outside of its devices. For any thread."""

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
        self._failed: dict[Adapter, Exception] = {}
        self._closing: set[Adapter] = set()  # admits no more requests, to make room
        self._offered: set[Adapter] = set()  # of requests that the newest look found ready, and may be chosen
        self._without_room: set[Adapter] = set()  # wanted in the newest look, and no slot could be had
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
        self._settle()
        if not self._without_room:
            self._closing.clear()
        self._without_room.clear()
        self._offered.clear()
        if isinstance(pool, InArrivalOrder):
            admitted = pool.admitted

            def waiting() -> Iterator[list[Request]]:
                yield from self._ready(pool.waiting(), admitted)

            return InArrivalOrder(admitted, waiting, all_plain=pool.all_plain)
        every = list(pool)
        admitted = [req for req in every if req.row >= 0]
        return [
            *admitted,
            *(req for some in self._ready((r for r in every if r.row < 0), admitted) for req in some),
        ]

    def take_failed(self, waiting: Iterable[Request]) -> list[Request]:
        """The waiting requests whose adapter could not be read, with the cause as their failure."""
        if not self._failed:
            return []
        failed: list[Request] = []
        for req in waiting:
            if req.adapter in self._failed:
                error = self._failed[req.adapter]
                req.failure, req.failure_kind = f"the adapter could not be read: {error}", AdapterFailed
                failed.append(req)
        self._failed.clear()
        return failed

    def waits(self, req: Request) -> bool:
        """Whether a waiting request waits for its adapter."""
        return req.adapter is not None and (req.adapter not in self._resident or req.adapter in self._closing)

    def _ready(self, waiting: Iterable[Request], admitted: Iterable[Request]) -> Iterator[list[Request]]:
        passed = 0
        for req in waiting:
            if req.adapter is None or self._is_ready(req.adapter, admitted):
                yield [req]
            else:
                passed += 1
                if passed == _MOST_PASSED:
                    return

    def _is_ready(self, adapter: Adapter, admitted: Iterable[Request]) -> bool:
        if adapter in self._closing:
            return False
        if adapter in self._resident:
            self._resident.move_to_end(adapter)
            self._offered.add(adapter)
            return True
        if adapter not in self._coming and adapter not in self._failed:
            self._begin(adapter, admitted)
        return False

    def _begin(self, adapter: Adapter, admitted: Iterable[Request]) -> None:
        """Begin to read an adapter, if there is a slot for it, or one that can be freed."""
        slot = self._room(admitted)
        if slot is None:
            self._without_room.add(adapter)
            return
        self._slots[slot] = adapter
        future = self._thread.submit(self._store.read, adapter)
        self._coming[adapter] = slot, future
        future.add_done_callback(lambda _: self._wake())

    def _room(self, admitted: Iterable[Request]) -> int | None:
        if None in self._slots:
            return self._slots.index(None)
        users = Counter(req.adapter for req in admitted if req.adapter is not None)
        idle = next((one for one in self._resident if not users[one] and one not in self._offered), None)
        if idle is None:
            open_ = [one for one in self._resident if one not in self._closing]
            if len(self._closing) <= len(self._without_room) and open_:
                self._closing.add(min(open_, key=lambda one: users[one]))
            return None
        del self._resident[idle]
        self._closing.discard(idle)
        slot, idle.slot = idle.slot, NOWHERE
        return slot

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
