"""Requests and the prefix cache: the blocks a request can begin with, and those it publishes for others."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from orca_jax.request.request import Request, Row
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_cache import chain_hashes, next_hash, root_hash

_NONE: Mapping[Request, int] = MappingProxyType({})


def prompt_hashes(prompt_ids: Sequence[int], cache_salt: Sequence[str], kv: KVManager) -> list[bytes] | None:
    """The hashes of a prompt's full blocks; None without a prefix cache.

    A long prompt takes milliseconds, so the service computes them before the request enters the pool.
    """
    return None if kv.prefixes is None else chain_hashes(_root(cache_salt, kv), prompt_ids, kv.block_size)


def hash_prompt(req: Request, kv: KVManager) -> list[bytes]:
    """The hashes of the request's full blocks, computed at the first call."""
    hashes = req.block_hashes
    if hashes is None:
        hashes = req.block_hashes = prompt_hashes(req.prompt_ids, req.cache_salt, kv) or []
    return hashes


def cached_blocks(req: Request, kv: KVManager) -> list[int]:
    """The cached blocks that a waiting request can begin with.

    At least one known token is left to compute, because the next token is sampled from it. A request for
    log-probabilities or the mean hidden state of its prompt computes the whole prompt. A request for the
    experts of its tokens computes all tokens whose experts are not known yet.
    """
    prefixes = kv.prefixes
    if prefixes is None or _needs_whole_prompt(req):
        return []
    hashes = hash_prompt(req, kv)
    blocks = prefixes.find(hashes, most_blocks(req, kv))
    if kv.snapshots is None or _read_in_to_a_state(req, len(blocks), kv):
        return blocks
    n = kv.snapshots.longest_in_tiers(hashes, len(blocks))
    costs = None if kv.host is None else kv.host.costs
    if costs is not None and n and hashes[n - 1] not in kv.snapshots:
        first = kv.snapshots.longest(hashes, n)
        n = n if costs.pays(costs.state * costs.host, first, n - first) else first
    return blocks[:n]


def host_blocks(req: Request, n_cached: int, kv: KVManager) -> int:
    """The number of blocks that a waiting request can read in from the host after its `n_cached` blocks.

    With recurrent layers these end where there is a state, on the devices or in the host's memory.
    """
    if kv.host is None or _needs_whole_prompt(req):
        return 0
    if kv.snapshots is not None:
        return _read_in_to_a_state(req, n_cached, kv)
    return kv.host.find(hash_prompt(req, kv), n_cached, most_blocks(req, kv))


def blocks_in_tiers(req: Request, kv: KVManager) -> int:
    """Count a prompt's first blocks on the devices or in the host's memory, with a state or without."""
    prefixes, host = kv.prefixes, kv.host
    assert prefixes is not None and host is not None
    hashes, most = hash_prompt(req, kv), most_blocks(req, kv)
    n_cached = len(prefixes.find(hashes, most))
    return n_cached + host.n_found(hashes, n_cached, most)


def _read_in_to_a_state(req: Request, n_cached: int, kv: KVManager) -> int:
    """The number of blocks to read in after the first `n_cached`, so that a state follows the last."""
    assert kv.snapshots is not None
    if kv.host is None:
        return 0
    hashes, costs = hash_prompt(req, kv), kv.host.costs
    end = n_cached + kv.host.n_found(hashes, n_cached, most_blocks(req, kv))
    n = kv.snapshots.longest_in_tiers(hashes, end, n_cached)
    if not n:
        return 0
    if costs is not None:
        first = kv.snapshots.longest_in_tiers(hashes, n_cached)
        n_states = 0 if hashes[n - 1] in kv.snapshots else costs.state
        if not costs.pays((n - n_cached + n_states) * costs.host, first, n - first):
            return 0
    return n - n_cached


def awaits_transfer(req: Request, kv: KVManager) -> bool:
    """Whether blocks are being fetched from another server for a waiting request."""
    return req.kv_transfer is not None and kv.arriving is not None and kv.arriving.awaits(req)


def begins_with_a_known_token(req: Request) -> bool:
    """Whether an output may begin with the token that another server sampled after its prompt.

    Not if the output has more than its tokens: log-probabilities, experts, a grammar's state, stop strings.
    """
    sampling = req.sampling
    plain = sampling.logprobs is None and sampling.prompt_logprobs is None and not sampling.stop
    plain = plain and not sampling.return_routed_experts and req.constraint is None
    return plain and req.pooling is None and not req.encoder_ids and not req.kind.forks


def awaits_blocks(req: Request, n_found: int, kv: KVManager) -> bool:
    """Whether blocks after the first `n_found` are being read from the disk tier for a waiting request."""
    if kv.disk is None or _needs_whole_prompt(req):
        return False
    n_here = n_found if kv.snapshots is None else max(n_found, blocks_in_tiers(req, kv))
    return kv.disk.awaits(req, hash_prompt(req, kv), n_found, most_blocks(req, kv), n_here=n_here)


def most_blocks(req: Request, kv: KVManager) -> int:
    """The most blocks that a waiting request can begin with."""
    n_most = min(req.n_tokens - 1, req.n_routed) if req.sampling.return_routed_experts else req.n_tokens - 1
    return n_most // kv.block_size


def _n_found(req: Request, kv: KVManager) -> int:
    n_cached = len(cached_blocks(req, kv))
    return n_cached + host_blocks(req, n_cached, kv)


def next_block_hash(req: Request, n_blocks: int, kv: KVManager) -> bytes | None:
    """The hash of the full block after the first `n_blocks`; None if that block is not full or not hashed."""
    if kv.prefixes is None:
        return None
    hashes = hash_prompt(req, kv)
    return hashes[n_blocks] if n_blocks < len(hashes) else None


def next_border(req: Request, n_computed: int, kv: KVManager) -> int | None:
    """The number of tokens at which a prompt's next piece must end, for a snapshot; None: anywhere."""
    prefixes, snapshots = kv.prefixes, kv.snapshots
    if prefixes is None or snapshots is None:
        return None
    hashes = hash_prompt(req, kv)
    n_cached = n_computed // kv.block_size
    while n_cached < len(hashes) and hashes[n_cached] in prefixes:
        n_cached += 1
    return snapshots.next_border(n_computed, req.n_tokens, n_cached * kv.block_size, req.row)


def coming_hash(req: Request, n_computed: int, kv: KVManager) -> bytes | None:
    """The hash of the block that others can begin after once this prompt's next piece is computed.

    Without recurrent layers it is the next block, with them the one before the next snapshot.
    """
    if kv.snapshots is None:
        return next_block_hash(req, n_computed // kv.block_size, kv)
    border = next_border(req, n_computed, kv)
    return None if border is None else next_block_hash(req, border // kv.block_size - 1, kv)


def is_coming(req: Request, n_cached: int, coming: Collection[bytes | None], kv: KVManager) -> bool:
    """Whether a waiting request that finds `n_cached` blocks would find more of them `coming`."""
    if kv.snapshots is None:
        block_hash = next_block_hash(req, n_cached, kv)
        return block_hash is not None and block_hash in coming
    if _needs_whole_prompt(req):
        return False
    return any(block_hash in coming for block_hash in islice(hash_prompt(req, kv), n_cached, None))


class LongestPrefixFirst:
    """Orders waiting requests in windows of `size` by arrival, each with the longest cached prefix first.

    A new window begins when no request of the last one waits, so at most `size` - 1 later arrivals overtake a
    request. Preempted requests go before all others, because their turn had come before.
    """

    def __init__(self, size: int, kv: KVManager) -> None:
        self._size = size
        self._kv = kv
        self._window: set[Request] = set()

    def order(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Reorder `waiting`, which is in order of arrival."""
        first: list[Request] = []
        rest = iter(waiting)
        for req in rest:
            if req.n_preempted:
                yield req
                continue
            first.append(req)
            if len(first) == self._size:
                break
        self._window.intersection_update(first)
        if not self._window:
            self._window.update(first)
        # The sort keeps the order of arrival among equals.
        first.sort(key=lambda req: (req not in self._window, -_n_found(req, self._kv)))
        yield from first
        yield from rest


def reserve_sharing(
    new: Sequence[Request],
    n_tokens: Iterable[int],
    cached: Mapping[Request, list[int]],
    kv: KVManager,
    read_in: Mapping[Request, int] = _NONE,
) -> None:
    """Reserve a row for each request, with blocks for its `n_tokens` that begin with its `cached` blocks.

    After these, its `read_in` blocks are read in from the host tier; other requests find them once the
    iteration is issued. Hits are counted at a request's first admission only.
    """
    prefixes = kv.prefixes
    assert prefixes is not None
    shared = [cached.get(req, []) for req in new]
    read = {
        req: hash_prompt(req, kv)[len(blocks) : len(blocks) + read_in[req]]
        for req, blocks in zip(new, shared, strict=True)
        if req in read_in
    }
    # Before any block is allocated, which may evict others to the host.
    if kv.host is not None:
        for hashes in read.values():
            kv.host.hold(hashes)
    held = dict[Request, tuple[int | None, bytes]]()
    if kv.snapshots is not None:
        for req, blocks in zip(new, shared, strict=True):
            n = len(blocks) + len(read.get(req, ()))
            if n:
                block_hash = hash_prompt(req, kv)[n - 1]
                held[req] = kv.snapshots.hold(block_hash), block_hash
    rows = kv.reserve_sharing(list(zip(n_tokens, shared, strict=True)))
    for req, row, blocks in zip(new, rows, shared, strict=True):
        req.row = row
        req.n_found = len(blocks)
        req.full_at = (len(blocks) + 1) * kv.block_size
        n = len(blocks)
        if req in read:
            assert kv.host is not None
            n += len(read[req])
            kv.host.read(read[req], kv.block_table[row, len(blocks) : n].tolist())
        req.n_computed = n * kv.block_size
        if kv.snapshots is not None and req in held:
            kv.snapshots.use(*held[req], row, req.n_computed)
        if not req.n_preempted:
            req.n_cached = req.n_computed
            prefixes.n_queries += len(req.prompt_ids)
            prefixes.n_hits += req.n_cached


def make_snapshots(rows: Iterable[Row], kv: KVManager) -> None:
    """Make the snapshots of the next iteration, which has these rows and is not issued yet.

    The states after the tokens of drafted rows are kept too.
    """
    drafts = kv.draft_states
    if drafts is not None:
        drafts.begin()
    for req, n_tokens in rows:
        if drafts is not None and n_tokens > 1 and req.kind.may_reject and not req.in_initiation:
            states = drafts.keep(req.row, req.n_computed, n_tokens)
            # A border that several tokens follow is the first. A second one could not be undone alone.
            border = (req.n_computed // kv.block_size + 1) * kv.block_size
            i = border - req.n_computed - 1
            if i < n_tokens:
                _make_snapshot(req, border, kv, states[i] if i < len(states) else None)
        else:
            _make_snapshot(req, req.n_computed + n_tokens, kv)


def _make_snapshot(req: Request, end: int, kv: KVManager, state: int | None = None) -> None:
    """Make a snapshot after the first `end` tokens of a request, if there is to be one there.

    It is copied from `state`; None: from the row's own.
    """
    prefixes, snapshots, size = kv.prefixes, kv.snapshots, kv.block_size
    if end % size or prefixes is None or snapshots is None:
        return
    known = next_block_hash(req, end // size - 1, kv)
    shared = known is not None and known in prefixes
    n_prompt = len(req.prompt_ids)
    snapshots.make(req.row, end, prompt=n_prompt, known=known, shared=shared, state=state)


def settle_drafts(req: Request, kv: KVManager) -> None:
    """Undo what rejected drafts of a request did to its state, now that `n_computed` tokens are right."""
    drafts, snapshots = kv.draft_states, kv.snapshots
    if drafts is not None and drafts.settle(req.row, req.n_computed) and snapshots is not None:
        snapshots.unmake(req.row, req.n_computed)


def publish_full_blocks(requests: Iterable[Request], kv: KVManager) -> None:
    """Let others find the full blocks of these requests that issued iterations compute.

    An iteration need not have returned: iterations run in the order of issue, so later ones may read its keys
    and values. The tokens of a block must be known, because they are its hash.
    """
    prefixes, size = kv.prefixes, kv.block_size
    if prefixes is None:
        return
    for req in requests:
        n_known = len(req.prompt_ids)  # beams share no more than the prompt
        if not req.kind.forks:
            n_known += len(req.output_ids)
        first, end = req.n_found, min(req.n_computed, n_known) // size
        if first < end:
            hashes = hash_prompt(req, kv)
            for i in range(first, end):
                if i == len(hashes):
                    previous = hashes[-1] if hashes else _root(req.cache_salt, kv)
                    hashes.append(next_hash(previous, req.known_ids(i * size, (i + 1) * size)))
                added = prefixes.add(kv.block_table.item(req.row, i), hashes[i])
                if kv.snapshots is not None:
                    kv.snapshots.name(req.row, i + 1, hashes[i])
                if prefixes.listener is not None and added and not any(req.cache_salt):
                    tokens = req.known_ids(i * size, (i + 1) * size)
                    prefixes.announce(hashes[i], hashes[i - 1] if i else None, tokens)
            req.n_found = end
        req.full_at = (req.n_found + 1) * size


def _root(cache_salt: Sequence[str], kv: KVManager) -> bytes:
    return root_hash(kv.hash_seed, kv.namespace, *kv.owner_of(cache_salt))


def _needs_whole_prompt(req: Request) -> bool:
    if req.pooling == "mean":  # no hidden states are kept
        return True
    return req.sampling.prompt_logprobs is not None and req.prompt_logprobs is None
