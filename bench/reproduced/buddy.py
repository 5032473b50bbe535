"""Orca as PagedAttention's authors imagined it: Algorithm 1 with contiguous keys and values, buddy-allocated.

"We assume Orca uses the buddy allocation algorithm to determine the physical address to store KV cache" (Kwon
et al., SOSP 2023, 6.1). The K/V manager here has blocks, which are always enough when contiguous slots are.
"""

from collections.abc import Collection, Iterable

from orca_jax.config import ServingConfig
from orca_jax.request.request import Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import Choice, OrcaPolicy
from orca_jax.scheduling.request_pool import split


def chunk_size(n: int) -> int:
    """The size of a chunk that holds `n` slots."""
    return 1 << max(0, n - 1).bit_length()


class BuddyAllocator:
    """Contiguous slots in chunks of powers of two, each split in two and merged again with its other half."""

    def __init__(self, n_slots: int) -> None:
        self._free: dict[int, set[int]] = {}  # by size, the addresses
        self._size: dict[int, int] = {}  # of each allocated chunk
        self._regions: list[range] = []
        start = 0
        for i in reversed(range(n_slots.bit_length())):
            if n_slots >> i & 1:
                self._free.setdefault(1 << i, set()).add(start)
                self._regions.append(range(start, start + (1 << i)))
                start += 1 << i

    def allocate(self, n: int) -> int | None:
        """The address of a chunk of at least `n` slots; None if there is none."""
        size = chunk_size(n)
        found = min((each for each, free in self._free.items() if free and each >= size), default=None)
        if found is None:
            return None
        address = min(self._free[found])
        self._free[found].remove(address)
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(address + found)
        self._size[address] = size
        return address

    def release(self, address: int) -> None:
        """Free a chunk."""
        size = self._size.pop(address)
        region = next(region for region in self._regions if address in region)
        while size < len(region):
            other = region.start + ((address - region.start) ^ size)
            if other not in self._free.get(size, ()):
                break
            self._free[size].remove(other)
            address = min(address, other)
            size *= 2
        self._free.setdefault(size, set()).add(address)


class BuddyOrca(OrcaPolicy):
    """Algorithm 1, which admits a request only if its slots can be contiguous."""

    def __init__(self, config: ServingConfig, kv: KVManager, *, n_workers: int) -> None:
        super().__init__(config, kv, n_workers=n_workers)
        self.allocator = BuddyAllocator(config.n_slots)
        self._address: dict[Request, int] = {}

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        admitted, waiting = split(pool)
        still = {*admitted}
        for req in [req for req in self._address if req not in still]:
            self.allocator.release(self._address.pop(req))
        new: list[Request] = []
        for req in waiting:
            address = self.allocator.allocate(req.max_tokens)
            if address is None:
                break
            self._address[req] = address
            new.append(req)
        choice = super().choose([*admitted, *new], n_rsrv, ahead, alone)
        chosen = {req for req, _ in choice.rows}
        for req in new:
            if req not in chosen:  # there was no room for another reason
                self.allocator.release(self._address.pop(req))
        return choice
