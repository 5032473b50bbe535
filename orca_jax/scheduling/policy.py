"""Policies choose the rows of the next iteration; the scheduler's loop is the same for all of them."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.request.request import PLAIN, Request, Row
from orca_jax.scheduling.draft_depth import draft_together
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.select import Held, select_rows

_NONE: Mapping[Request, list[int]] = MappingProxyType({})
_NONE_READ: Mapping[Request, int] = MappingProxyType({})


class Choice(NamedTuple):
    """The rows of the next iteration, and the new `n_rsrv` once they are issued (Algorithm 1, line 4).

    The requests in `preempted` give up their slots first; none of them is in flight. `cached` maps newly
    admitted requests to the cached blocks they begin with. `held` is the first request in order that was
    ready and not chosen, and why; None if there is none. `short` lists the rows whose requests need a row or
    blocks first; None if the policy does not know, so that the scheduler looks for them. `read_in` has
    the number of blocks that a newly admitted request reads in from the host tier, after its `cached` ones.
    """

    rows: list[Row]
    n_rsrv: int
    preempted: Collection[Request] = ()
    cached: Mapping[Request, list[int]] = _NONE
    held: Held | None = None
    short: list[Row] | None = None
    read_in: Mapping[Request, int] = _NONE_READ


def fill_places(rows: list[Row], max_bs: int, most_drafts: int | None = None) -> None:
    """Let increments that can compute several tokens use the places left in a batch of increments.

    Up to `most_drafts` of these tokens may be drafts; None: any number.
    """
    free = max_bs - sum(max(req.kind.n_rows, n_tokens) for req, n_tokens in rows)
    drafted = [req for req, _ in rows if req.kind.shared_drafter is not None]
    if free > 0 and drafted:
        n_places = free if most_drafts is None else min(free, most_drafts)
        draft_together([(req, req.kind.chances([req])[0]) for req in drafted], n_places)
    several = [i for i, (req, _) in enumerate(rows) if req.kind is not PLAIN and not req.in_initiation]
    for i in several:
        if free <= 0:
            break
        req, n_tokens = rows[i]
        n_more = max(0, min(free, req.kind.most_tokens([req])[0] - n_tokens))
        if most_drafts is not None and req.kind.may_reject:
            n_more = min(n_more, most_drafts)
            most_drafts -= n_more
        rows[i] = req, n_tokens + n_more
        free -= n_more


def one_phase(
    choice: Choice, n_rsrv: int, *, max_bs: int, most_drafts: int | None = None, initiated_last: bool
) -> tuple[Choice, bool]:
    """Keep the rows of one phase, and say whether it is prefill. Deterministic engines alternate phases.

    `n_rsrv` is the value before the choice; increments do not change it. `most_drafts` as in `fill_places`.
    """
    initiations = [row for row in choice.rows if row[0].in_initiation]
    increments = [row for row in choice.rows if not row[0].in_initiation]
    # Initiations may go first: the requests with increments arrived earlier and have already run.
    if initiations and not (increments and initiated_last):
        held = (increments[0][0], "phase") if increments else choice.held
        return choice._replace(rows=initiations, held=held, short=None), True
    held = (initiations[0][0], "phase") if initiations else choice.held
    fill_places(increments, max_bs, most_drafts)
    return Choice(increments, n_rsrv, held=held), False


class Policy(Protocol):
    """Chooses the requests of the next iteration, and the number of tokens of each."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        """Choose the rows of the next iteration. Changes no request and no slots.

        `pool` has the admitted requests first, then the waiting ones in queue order. A RUNNING request may be
        chosen only if it is in `ahead`. A row computes between one and all of the tokens that its request has
        left to compute. If `alone` is a request, no other one may be chosen.
        """
        ...


class OrcaPolicy:
    """Algorithm 1: each prompt in a single iteration, and slots reserved for whole requests.

    Requests are taken in the order of the pool: first come, first served, unless a subclass reorders it.
    Admitted requests must stay before waiting ones, because the loop stops at the first that does not fit.
    Raises ConfigError for chunked prefill and for reservation on demand.
    """

    def __init__(self, config: ServingConfig, kv: KVManager, *, n_workers: int) -> None:
        scheduling = config.scheduling
        if scheduling.chunked_prefill or scheduling.on_demand:
            raise ConfigError(
                f"policy {scheduling.policy!r} is an OrcaPolicy, which computes each prompt whole and "
                "reserves slots for whole requests; add chunked_prefill=False and reservation='full' "
                "(--no-chunked-prefill --reservation full)"
            )
        self.max_bs = config.max_batch_size
        self.n_slots = config.n_slots
        self.max_batch_tokens = config.max_batch_tokens
        self.block_size = config.block_size

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        rows, n_rsrv, held = select_rows(
            pool if alone is None else [alone],
            n_rsrv,
            max_bs=self.max_bs,
            n_slots=self.n_slots,
            max_batch_tokens=self.max_batch_tokens,
            block_size=self.block_size,
            ahead=ahead,
        )
        return Choice(rows, n_rsrv, held=held)
