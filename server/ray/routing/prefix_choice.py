"""Chooses the engine that has most of a prompt cached, and its adapter, unless that engine is too busy.

An engine's score is `tolerance * share - pressure`, and `adapter_tolerance` more if it was sent a request
for the same LoRA adapter before, which it then need not read. `share` is the part of the prompt that the
engine was sent before, 0 to 1, and `pressure` is how full the engine is, 1 for a full batch. So an engine
with the whole prompt may be fuller than the emptiest one by `tolerance` of a batch, and one with a tenth of
the prompt by a tenth of that: conversations stay on their engines, and a short beginning that all prompts
have in common does not send all of them to one engine.

The router remembers what each engine was sent and asks no engine. If an engine has evicted a prompt since,
it computes the prompt again, as any other engine would have to.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple


class RoutingKey(NamedTuple):
    """Hashes of 64 bits: `prefix` of a prompt's steps, `adapter` of a model's name that is not the base's."""

    prefix: tuple[int, ...] = ()
    adapter: int | None = None


NO_KEY = RoutingKey()


_STEP = 64  # bytes of each of the first steps
_GROWS_AFTER = 64  # steps of one length; the steps after them are four times as long
MOST_STEPS = 256


def step_hashes(root: bytes, pieces: Iterable[bytes], *, whole_steps: bool) -> tuple[int, ...]:
    """Make a chain of at most MOST_STEPS hashes of 64 bits; another `root` changes all of them.

    No step spans two pieces. The rest of a piece is a step too, except with `whole_steps`.
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
    """Return the most bytes of a prompt that its first `n_steps` can cover."""
    groups, rest = divmod(n_steps, _GROWS_AFTER)
    return sum(_GROWS_AFTER * _step(_GROWS_AFTER * group) for group in range(groups)) + rest * _step(n_steps)


def _step(index: int) -> int:
    return _STEP << (2 * (index // _GROWS_AFTER))


_MOST_HOLDERS = 8  # engines that are remembered for one beginning
_SAME = 1e-6  # difference below which two engines are equally full, because loads are measured


class PrefixChoice:
    """Remembers which beginnings of prompts each engine was sent. For one thread.

    Engines are known by names that are never used again. It remembers the `most_steps` most recent steps, in
    about 200 bytes each.
    """

    def __init__(
        self, *, tolerance: float = 0.5, adapter_tolerance: float = 0.25, most_steps: int = 1 << 17
    ) -> None:
        self._tolerance, self._adapter_tolerance = tolerance, adapter_tolerance
        self._most_steps = most_steps
        # Engines by step, or by adapter, the most recent first.
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._n_chosen = 0
        self._last_chosen: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of remembered steps."""
        return len(self._holders)

    def order(
        self, chain: Sequence[int], pressures: Mapping[str, float], adapter: int | None = None
    ) -> list[str]:
        """Order the engines of `pressures`, the best for a prompt with this `chain` and `adapter` first.

        A hash of the adapter, or of the chain's first step, orders equally good engines, so that routers with
        different memories often agree; without either the one that was chosen longest ago comes first.
        """
        depths = self._depths(chain, pressures)
        whole = covered_bytes(len(chain)) or 1
        with_adapter = () if adapter is None else self._holders.get(adapter, ())
        first = chain[0] if adapter is None and chain else adapter

        def score(name: str) -> float:
            known = self._adapter_tolerance * (name in with_adapter)
            return self._tolerance * covered_bytes(depths[name]) / whole + known - pressures[name]

        keys = {
            name: (
                -round(score(name) / _SAME),
                self._last_chosen.get(name, 0) if first is None else _rendezvous(first, name),
            )
            for name in pressures
        }
        return sorted(pressures, key=keys.__getitem__)

    def sent(self, chain: Sequence[int], name: str, adapter: int | None = None) -> None:
        """Remember that engine `name` was sent a request with this chain and adapter."""
        self._n_chosen += 1
        self._last_chosen[name] = self._n_chosen
        holders = self._holders
        # The first step comes last, so it is forgotten last: the others are found through it.
        for step in (*reversed(chain), *(() if adapter is None else (adapter,))):
            known = holders.get(step, ())
            if not known or known[0] != name:
                others = [other for other in known if other != name]
                holders[step] = (name, *others[: _MOST_HOLDERS - 1])
            holders.move_to_end(step)
        while len(holders) > self._most_steps:
            holders.popitem(last=False)

    def keep(self, names: set[str]) -> None:
        """Forget all engines but these. Steps of the others are never found again, and age away."""
        self._last_chosen = {name: turn for name, turn in self._last_chosen.items() if name in names}

    def _depths(self, chain: Sequence[int], names: Mapping[str, float]) -> dict[str, int]:
        """Count the steps from the beginning that each engine was sent."""
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


_UNSENT_SECONDS = 5.0  # after which a request was probably given up unsent: its end is never reported


class Ongoing:
    """Counts the requests of each engine, from their choice on so that a burst spreads over engines.

    For one thread. A request is known by its id.
    """

    def __init__(self) -> None:
        self._chosen: dict[
            str, tuple[str, float]
        ] = {}  # engine and time of requests that have not arrived; the oldest first
        self._running: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def count(self, engine: str) -> int:
        """Return the number of requests that `engine` runs or will soon get."""
        return self._counts[engine]

    def chose(self, request: str, engine: str, now: float | None = None) -> None:
        """Count a request for `engine`; until it arrives, another engine may be chosen."""
        now = monotonic() if now is None else now
        self.ended(request)
        self._forget_unsent(now)
        self._chosen[request] = engine, now
        self._counts[engine] += 1

    def arrived(self, request: str, engine: str) -> None:
        """Note that the engine has accepted the request, unless the request has ended meanwhile."""
        if (chosen := self._chosen.pop(request, None)) is None:
            return
        self._subtract(chosen[0])
        self._running[request] = engine
        self._counts[engine] += 1

    def ended(self, request: str) -> None:
        """Stop counting a request that has ended or was refused."""
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
