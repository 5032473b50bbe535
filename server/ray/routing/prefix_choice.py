"""Where a request goes: to the engine that has most of its prompt cached, unless that one is too busy.

An engine's score is `tolerance * share - pressure`. `share` is the part of the prompt that the engine was
sent before, 0 to 1, and `pressure` how full it is, 1 for a full batch. So an engine with the whole prompt may
be fuller than the emptiest one by `tolerance` of a batch, one with a tenth of the prompt by a tenth of that:
conversations stay where they are, and a short beginning that all have in common does not draw them together.

What an engine was sent is remembered here and never asked for. What it has evicted since costs a computation,
which another engine would have had too.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic

_STEP = 64  # bytes of the first steps
_GROWS_AFTER = 64  # steps; each such group's steps are four times as long as those of the group before
MOST_STEPS = 256


def step_hashes(root: bytes, pieces: Iterable[bytes], *, whole_steps: bool) -> tuple[int, ...]:
    """At most MOST_STEPS hashes of 64 bits, which with another `root` are all others.

    No step spans two pieces. What is left of a piece is a step too, unless there are only `whole_steps`.
    """
    digest = hashlib.blake2b(root, digest_size=8).digest()
    hashes = list[int]()
    for piece in pieces:
        start = 0
        while start < len(piece):
            if len(hashes) == MOST_STEPS:
                return tuple(hashes)
            end = start + _step(len(hashes))
            if whole_steps and end > len(piece):
                break
            digest = hashlib.blake2b(piece[start:end], digest_size=8, key=digest).digest()
            hashes.append(int.from_bytes(digest, "little"))
            start = end
    return tuple(hashes)


def covered_bytes(n_steps: int) -> int:
    """The most bytes of a prompt that its first `n_steps` cover."""
    groups, rest = divmod(n_steps, _GROWS_AFTER)
    return sum(_GROWS_AFTER * _step(_GROWS_AFTER * group) for group in range(groups)) + rest * _step(n_steps)


def _step(index: int) -> int:
    return _STEP << (2 * (index // _GROWS_AFTER))


_MOST_HOLDERS = 8  # engines remembered for one beginning; more have it, and are found by their pressure
# Two engines count as equally full if they differ by less: their loads are measured, not exact.
_SAME = 1e-6


class PrefixChoice:
    """Remembers which engines were sent which beginnings. For one thread.

    An engine is any name that no other one gets. Memory: about 200 bytes for each of `most_steps`, the most
    recently sent ones.
    """

    def __init__(self, *, tolerance: float = 0.5, most_steps: int = 1 << 17) -> None:
        self._tolerance = tolerance
        self._most_steps = most_steps
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the last one first
        self._n_chosen = 0
        self._last_chosen: dict[str, int] = {}

    def __len__(self) -> int:
        """The remembered steps."""
        return len(self._holders)

    def order(self, chain: Sequence[int], pressures: Mapping[str, float]) -> list[str]:
        """All engines of `pressures`, the best for a prompt with this `chain` first.

        Among equals those go first that a hash of the chain's first step prefers, so that routers with
        different memories often agree; without a chain, those that were chosen longest ago.
        """
        depths = self._depths(chain, pressures)
        whole = covered_bytes(len(chain)) or 1
        keys = {
            name: (
                -round((self._tolerance * covered_bytes(depths[name]) / whole - pressure) / _SAME),
                _rendezvous(chain[0], name) if chain else self._last_chosen.get(name, 0),
            )
            for name, pressure in pressures.items()
        }
        return sorted(pressures, key=keys.__getitem__)

    def sent(self, chain: Sequence[int], name: str) -> None:
        """A request with this chain went to engine `name`."""
        self._n_chosen += 1
        self._last_chosen[name] = self._n_chosen
        holders = self._holders
        for step in reversed(chain):  # the first step is forgotten last: without it the others are not found
            known = holders.get(step, ())
            if not known or known[0] != name:
                others = [other for other in known if other != name]
                holders[step] = (name, *others[: _MOST_HOLDERS - 1])
            holders.move_to_end(step)
        while len(holders) > self._most_steps:
            holders.popitem(last=False)

    def keep(self, names: set[str]) -> None:
        """Only these engines are left. What the others were sent is never found again, and ages away."""
        self._last_chosen = {name: turn for name, turn in self._last_chosen.items() if name in names}

    def _depths(self, chain: Sequence[int], names: Mapping[str, float]) -> dict[str, int]:
        """How many steps from the beginning each engine was sent."""
        depths = dict.fromkeys(names, 0)
        left = set(names)
        for depth, step in enumerate(chain, 1):
            left.intersection_update(self._holders.get(step, ()))
            if not left:
                break
            for name in left:
                depths[name] = depth
        return depths


def _rendezvous(step: int, name: str) -> int:
    digest = hashlib.blake2b(step.to_bytes(8, "little") + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_UNSENT_SECONDS = 5.0  # a request that was given up before it was sent is never reported as ended


class Ongoing:
    """Counts requests from the choice of their engine on, so that a burst is spread before any of it arrives.

    For one thread. A request is known by its id.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, tuple[str, float]] = {}  # not known to have arrived; the oldest first
        self._running: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, engine: str) -> int:
        """The requests that are at `engine`, or on their way."""
        return self._counts[engine]

    def chose(self, request: str, engine: str, now: float | None = None) -> None:
        """The request is about to be sent to `engine`; until it arrives, another may be chosen."""
        now = monotonic() if now is None else now
        self.ended(request)
        self._forget_unsent(now)
        self._chosen[request] = engine, now
        self._counts[engine] += 1

    def arrived(self, request: str, engine: str) -> None:
        """The engine has accepted the request. One that has ended meanwhile is not counted again."""
        if (chosen := self._chosen.pop(request, None)) is None:
            return
        self._subtract(chosen[0])
        self._running[request] = engine
        self._counts[engine] += 1

    def ended(self, request: str) -> None:
        """The request has ended, or was refused."""
        if (chosen := self._chosen.pop(request, None)) is not None:
            self._subtract(chosen[0])
        if (engine := self._running.pop(request, None)) is not None:
            self._subtract(engine)

    def _forget_unsent(self, now: float) -> None:
        while self._chosen:
            request, (engine, since) = next(iter(self._chosen.items()))
            if now - since < _UNSENT_SECONDS:
                break
            del self._chosen[request]
            self._subtract(engine)

    def _subtract(self, engine: str) -> None:
        self._counts[engine] -= 1
        if not self._counts[engine]:
            del self._counts[engine]
