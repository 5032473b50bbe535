"""The baseline: request-level scheduling, on our engine, so that only the scheduling differs (ORCA 2, 6).

The paper compares with FasterTransformer behind a queue that forms batches of at most `max_bs` requests,
first come, first served. A batch runs until its longest request ends; only then are results returned and the
next batch formed, so requests that finished early or came late wait for it. A batch has one input length,
its shortest input's: the first iteration takes that many tokens of every request, and the rest of longer
inputs is fed one token an iteration (6.2). Keys and values
are reserved for the model's maximum length (6.1). Over inter-layer partitions the batch goes as microbatches
of `mbs` requests, one after the other (4.2).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from orca_jax.request.request import Request, RequestState, Row, begin_iteration
from orca_jax.scheduling.engine_protocol import Engine, Iteration, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.timeline import Timeline


class RowWork(StrEnum):
    """The use of one row's computation in an iteration."""

    GENERATING = "generating"  # a token of the request's output
    FED = "fed"  # a piece of the input; nothing is sampled, because the next token is input too
    DONE = "done"  # computed for nothing: the request has all its tokens


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """The rows of the timeline's iteration with the same `number`, in its order."""

    number: int
    batch: int  # counts the batches of requests
    rows: tuple[RowWork, ...]


@dataclass(slots=True, eq=False)
class _Place:
    """A request in its batch. The engine runs `inner`, which continues as long as the batch."""

    outer: Request
    inner: Request

    def next_row(self, n_first: int) -> Row:
        """The tokens for the next iteration: the first `n_first` of the input, then one at a time."""
        return (self.inner, 1 if self.inner.n_computed else n_first)

    def work_of(self, row: Row) -> RowWork:
        """The use of this row's iteration."""
        place = self.inner.n_computed + row[1]  # the iteration of the first token after its input
        if place < len(self.outer.prompt_ids):
            return RowWork.FED
        return RowWork.GENERATING if place < self.outer.max_tokens else RowWork.DONE

    def take(self, token_id: int, *, sampled: bool) -> None:
        """Take the token that a returned iteration sampled, if any."""
        inner = self.inner
        inner.n_in_flight -= 1
        inner.n_partial -= not sampled
        if sampled:
            inner.output_ids.append(token_id)
        if not inner.n_in_flight:
            inner.state = RequestState.INCREMENT if sampled else RequestState.INITIATION

    def output_ids(self) -> list[int]:
        """The request's output, without tokens computed beyond its length."""
        return self.inner.output_ids[: self.outer.max_tokens - len(self.outer.prompt_ids)]


class RequestLevelScheduler:
    """Runs batches of requests, each to its end; `step` is one turn, as in `Scheduler`.

    `max_length` is the number of slots reserved for each request, and the maximum of its input and output
    tokens; a batch has as many requests as fit, at most `max_bs`. With `overlap`, over an engine that keeps
    tokens, a microbatch is issued once more while it is in flight, as ORCA's scheduler does. Requests end by
    length or by an end token; a request to end early is ignored. `iterations` has the use of each row in the
    latest iterations of the timeline.
    """

    def __init__(
        self,
        pool: RequestPool,
        engine: Engine,
        kv: KVManager,
        *,
        max_bs: int,
        mbs: int,
        max_length: int,
        timeline: Timeline,
        overlap: bool = True,
    ) -> None:
        assert 1 <= mbs <= max_bs, f"microbatches of {mbs} of batches of {max_bs}"
        self.pool = pool
        self.engine = engine
        self.kv = kv
        self.max_bs = max_bs
        self.mbs = mbs
        self.max_length = max_length
        self.timeline = timeline
        self.iterations: deque[RowsRecord] = deque(maxlen=timeline.iterations.maxlen)
        self.n_batches = 0
        self._batch: list[_Place] = []
        self._longest = 0  # tokens of its longest request, to which every row runs
        self._n_first = 0  # tokens of its shortest input
        self._to_issue: deque[list[_Place]] = deque()  # microbatches with iterations left, in turn
        self._in_flight: deque[tuple[list[_Place], Iteration]] = deque()
        self._most_ahead = 2 if overlap and engine.keeps_tokens else 1  # of one microbatch in flight,
        self._most_in_flight = engine.n_workers + self._most_ahead - 1  # and of all

    def step(self) -> bool:
        """Issue a microbatch if one may be, and take the oldest back if no other may; False if none is live.

        Raises what the engine raises.
        """
        if not self._batch and not self._form_batch():
            return False
        if self._may_issue():
            self._issue()
        if not self._may_issue():
            self._take_return()
        if not self._to_issue and not self._in_flight:
            self._end_batch()
        return True

    def _may_issue(self) -> bool:
        """Whether the next microbatch has returned, or may be issued twice."""
        if not self._to_issue or len(self._in_flight) == self._most_in_flight:
            return False
        return self._to_issue[0][0].inner.n_in_flight < self._most_ahead

    def _form_batch(self) -> bool:
        """Form a batch of the oldest waiting requests, as many as fit; return whether there are any."""
        assert self.kv.n_free_rows == self.kv.n_rows, "the batch before has ended"
        blocks_each = -(-self.max_length // self.kv.block_size)
        room = min(self.max_bs, self.kv.n_rows, self.kv.n_blocks // blocks_each)
        assert room, f"{self.kv.n_blocks} blocks do not hold {self.max_length} tokens"
        outer = list(islice(self.pool.in_arrival_order(), room))
        if not outer:
            return False
        self.pool.admit(outer)
        self._n_first = min(len(req.prompt_ids) for req in outer)
        self._longest = max(req.max_tokens for req in outer)
        assert self._longest <= self.max_length, f"a request of {self._longest} tokens"
        self._batch = [_Place(req, self._inner(req)) for req in outer]
        self._to_issue.extend(
            self._batch[start : start + self.mbs] for start in range(0, len(outer), self.mbs)
        )
        self.n_batches += 1
        return True

    def _inner(self, req: Request) -> Request:
        """The request that the engine runs for `req`, with a row and slots for the maximum length."""
        req.state = RequestState.RUNNING
        return Request(
            request_id=req.request_id,
            prompt_ids=req.prompt_ids,
            max_tokens=self.max_length,
            sampling=req.sampling,
            seed=req.seed,
            arrival=req.arrival,
            row=self.kv.reserve(self.max_length),
        )

    def _issue(self) -> None:
        """Issue one iteration of the next microbatch, then put it last in the queue until the batch ends."""
        places = self._to_issue.popleft()
        rows = [place.next_row(self._n_first) for place in places]
        record = self.timeline.issued(rows)
        works = tuple([place.work_of(row) for place, row in zip(places, rows, strict=True)])
        self.iterations.append(RowsRecord(record.number, self.n_batches - 1, works))
        iteration = self.engine.issue(rows)
        iteration.record = record
        iteration.partial = frozenset(begin_iteration(rows)[0])
        for place in places:
            place.outer.n_iterations += 1
        self._in_flight.append((places, iteration))
        if places[0].inner.n_computed + 1 < self._longest:
            self._to_issue.append(places)

    def _take_return(self) -> None:
        """Take back the oldest microbatch in flight."""
        places, iteration = self._in_flight.popleft()
        returned = self.engine.wait(iteration, never)
        assert returned is not None, "nothing interrupts a batch"
        assert iteration.record is not None
        self.timeline.returned(iteration.record)
        for i, (place, token_id) in enumerate(zip(places, returned.token_ids, strict=True)):
            place.take(int(token_id), sampled=i not in iteration.partial)

    def _end_batch(self) -> None:
        """Deliver everything and free every slot."""
        deliveries: list[Delivery] = []
        for place in self._batch:
            req = place.outer
            reason = None
            for n_new, token_id in enumerate(place.output_ids(), start=1):
                reason = req.accept(token_id)
                if reason is not None:
                    deliveries.append((req, n_new, reason))
                    break
            req.state = RequestState.FINISHED
            req.finish_reason = reason
            place.inner.state = RequestState.FINISHED
            self.kv.release(place.inner.row)
            self.pool.remove(req)
        self._batch.clear()
        self.timeline.delivered(deliveries)
        self.pool.deliver(deliveries)


def most_tokens_at_once(input_lengths: Sequence[int], mbs: int) -> int:
    """The maximum of tokens in one iteration of the baseline for requests with these inputs, oldest first.

    A microbatch consists of neighbouring requests, and each takes as many tokens as the shortest has.
    """
    most = 0
    for start, shortest in enumerate(input_lengths):
        for n, length in enumerate(input_lengths[start : start + mbs], 1):
            shortest = min(shortest, length)
            most = max(most, n * shortest)
    return most
