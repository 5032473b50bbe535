"""A request, its states (ORCA 4.2), and how it enters iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.errors import InvalidPrompt, OutputFailed
from orca_jax.request.adapter import Adapter
from orca_jax.request.beam_search import Hypothesis
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.pooling import Pooling
from orca_jax.request.routed_experts import ExpertIds, RoutedTokens
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams


class RequestState(Enum):
    """The states of Algorithm 1, and FINISHED. Initiation is prefill; increment is decode."""

    INITIATION = "initiation"  # next: an iteration over input tokens (prefill)
    RUNNING = "running"  # in one batch in flight, or with overlap in two
    INCREMENT = "increment"  # next: an iteration over the last token (decode)
    FINISHED = "finished"


# Module-level names, because access to a member through its Enum is slow.
_RUNNING, _INCREMENT = RequestState.RUNNING, RequestState.INCREMENT

_NEVER = (1 << 30) - 1  # more tokens than a request can have


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence or stop token, a stop string, or a grammar's end
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


class OutputSink(Protocol):
    """Receives the output tokens of a request, on the scheduler's thread."""

    def push(self, token_id: int) -> bool:
        """Take a token; True if it completes a stop string."""
        ...


class OutputConstraint(Protocol):
    """Restricts the next tokens of a request's output. For the scheduler's thread."""

    @property
    def failure(self) -> str | None:
        """Why the output cannot continue; None while it can."""
        ...

    @property
    def failure_kind(self) -> type[OutputFailed]:
        """The class of the error that `failure` is the message of."""
        ...

    def acts(self, n_output: int) -> bool:
        """Whether it may forbid a token after `n_output` output tokens."""
        ...

    def allowed(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], into: npt.NDArray[np.int32]
    ) -> None:
        """Write the mask of allowed next tokens to `into`: token t is bit t % 32 of word t // 32."""
        ...

    def drafts(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], drafts: Sequence[int], n: int
    ) -> Sequence[int]:
        """The first of these drafts that may follow without ending the output, or up to `n` forced tokens."""
        ...

    @property
    def n_followed(self) -> int:
        """The number of the newest drafts after which the masks hold."""
        ...

    def allowed_after(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        drafts: Sequence[int],
        into: npt.NDArray[np.int32],
    ) -> None:
        """Write the mask of the tokens allowed after each draft to `into`, `[len(drafts), n_words]`."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next output token; True if the output is complete."""
        ...


SAMPLED = -1  # the `next_id` of a row that samples its next token


class InputRow(NamedTuple):
    """A row of the control message whose input tokens the host knows; in an increment, one row a token."""

    place: int  # the row of the block table
    start: int  # the number of tokens before the input
    ids: Sequence[int]  # the input tokens
    next_id: int = SAMPLED  # the token after the input, if it is known
    answers: bool = True  # whether that token belongs to the output, and may return log-probabilities


# A request's results: the token of each of its rows that answers, and log-probabilities if requested. A plain
# tuple for speed, like `Row` below: every drafted request in every iteration makes one.
RowAnswer = tuple[Sequence[int], Sequence[TokenLogprobs]]

# The tokens for the user, at least one, and the finish reason if the last one ends the request.
Accepted = tuple[Sequence[int], FinishReason | None]


class SharedDrafter(Protocol):
    """Drafts for several requests at once, in iterations of its own. For the scheduler's thread.

    `wanted` has requests in their increments, none of them in flight, each with a number of drafts of at
    least 1.
    """

    @property
    def failed(self) -> bool:
        """Whether it will draft nothing any more."""
        ...

    def cost(self, wanted: "Sequence[tuple[Request, int]]") -> float:
        """The time of drafting for these requests, in the unit of the engine's iteration costs."""
        ...

    def draft(self, wanted: "Sequence[tuple[Request, int]]") -> Sequence[Sequence[int] | None]:
        """The drafts of each request, perhaps fewer or none; None if it can never be drafted.

        Called at most once for each length of an output.
        """
        ...


class RowKind:
    """A way for a request to enter iterations and to accept the results. This class is the plain kind.

    A plain request has one row per iteration: first chunks of its prompt, whose tokens the host knows, then
    its newest token, which may be only on the device. The row's last position gives logits, and one token
    comes back. Each other kind is a subclass in a file of iteration/rows/. A kind with state is created
    for each request.
    """

    n_rows = 1  # rows of the block table per request, each of which takes a place in every batch
    knows_ids = False  # whether `known_ids` takes the place of `rows`
    forks = False  # whether rows diverge after the prompt, and may continue one another's
    may_reject = False  # whether an increment's tokens after the first are drafts, which may be rejected
    greedy = False  # whether temperature 0 replaces the request's
    scored_ids: Sequence[int] = ()  # the output, if it is known and only scored
    sent: Sequence[int] = ()  # drafts of the iteration in flight: input tokens after the output so far

    @property
    def parents(self) -> Sequence[int]:
        """For each row of the next iteration, the index of the previous iteration's row that it continues."""
        return (0,)

    @property
    def found(self) -> Sequence[Hypothesis] | None:
        """The outputs of a search, best first: empty before its end. None if the request has one output."""
        return None

    @property
    def predicted(self) -> tuple[int, int] | None:
        """The numbers of a prediction's tokens that are in the output and that are not; None without one."""
        return None

    @classmethod
    def chances(cls, requests: "Sequence[Request]") -> list[float]:
        """For each of these requests of the kind, the probability that an increment's further token is kept.

        It is an estimate, if the tokens before it are kept.
        """
        return [1.0] * len(requests)

    @property
    def shared_drafter(self) -> SharedDrafter | None:
        """The drafter of this and other requests' further tokens; None if each has its own, or none."""
        return None

    def n_wanted(self, req: "Request") -> int:
        """The most drafts of the shared drafter that the next increment can use; 0 if it needs none."""
        return 0

    def take_drafts(self, req: "Request", drafts: Sequence[int] | None) -> None:
        """Take what the shared drafter has drafted, for the next increment."""

    def runs_ahead(self, req: "Request") -> bool:
        """Whether the request may be issued again before its token returns."""
        return True

    def holds_batch(self, req: "Request", *, has_room: bool) -> bool:
        """Whether no other request of its batch may be issued again either before its tokens return.

        `has_room`: the next batch has places for more than a token of each request.
        """
        return False

    def n_logprobs(self, req: "Request") -> int | None:
        """The number of top log-probabilities to return; None: none, not even the token's."""
        return req.sampling.logprobs

    @classmethod
    def most_tokens(cls, requests: "Sequence[Request]") -> list[int]:
        """For each of these requests of the kind, the most tokens that its next increment can compute."""
        return [1] * len(requests)

    @classmethod
    def known_ids(cls, rows: "Sequence[Row]") -> list[Sequence[int]]:
        """For each of these rows of the kind, the input tokens of the next iteration that the host knows.

        No tokens make a plain row, and others a row each: neighbours in the request's row of the block table.
        """
        return [()] * len(rows)

    def rows(self, req: "Request", n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        """The rows of the next iteration, which computes `n_tokens`; `places` are the request's table rows.

        None: a plain row, of a chunk of the prompt, or in an increment of the newest token, which the device
        has. For plain requests it is called only in the initiation phase.
        """
        return [prompt_chunk(req, n_tokens)]

    def accept(self, req: "Request", answer: RowAnswer) -> Accepted:
        """Take the results of an iteration."""
        token_ids, logprobs = answer
        req.logprobs += logprobs
        return token_ids[:1], req.accept(token_ids[0])

    @classmethod
    def accept_all(cls, requests: "Sequence[Request]", answers: Sequence[RowAnswer]) -> list[Accepted]:
        """Take the results of an iteration for all of these requests of the kind."""
        return [req.kind.accept(req, answer) for req, answer in zip(requests, answers, strict=True)]

    def end(self, req: "Request") -> None:
        """Take note that the output is complete."""

    def restart(self, req: "Request") -> None:
        """Prepare for computing all keys and values of the request again."""


PLAIN = RowKind()


def by_kind(requests: "Sequence[Request]") -> list[tuple[type[RowKind], slice]]:
    """The classes of the requests' kinds, each with the places of neighbours: it answers for all of them."""
    classes = [req.kind.__class__ for req in requests]
    if len(set(classes)) == 1:  # as mostly, in half the time
        return [(classes[0], slice(0, len(classes)))]
    groups, first = list[tuple[type[RowKind], slice]](), 0
    for cls, group in groupby(classes):
        end = first + len(list(group))
        groups.append((cls, slice(first, end)))
        first = end
    return groups


@dataclass(slots=True, eq=False)
class Request:
    """One request in the pool. Only the scheduler changes `state` and the fields after it.

    `max_tokens` counts input plus output tokens; that many slots are reserved (Algorithm 1, line 24). The
    pool sets `arrival`, a number, and `arrived`, the seconds of its clock. `row` is the request's row in the
    block table and in per-row state on the device, from admission to end; otherwise -1. Any of
    `end_token_ids` ends the output. `failure` is why the request ended with the reason `error`, if the cause
    concerns only this request, and `failure_kind` the class of that error. `owner` is the client whose share
    of the queue the request uses ("": no share applies), and `weight` its memory in bytes. `n_losses` counts
    the losses of a worker while the request was in flight, `n_faults` those that a request may have caused,
    and `n_stuck` those at which it ran alone and had `lost_at` tokens, as at the last loss. After a loss the
    request runs alone until it has `alone_until` tokens (scheduling/quarantine.py).

    An iteration computes a number of tokens from `n_computed` on. If that includes the last known token, it
    samples the next one. So a prompt can be computed in chunks, or start after cached tokens, or be
    recomputed after a loss or a preemption, which reset `n_computed` to 0.

    With priorities, a request with a lower `priority` goes first; the queue sets `rank`, and serves lower
    ranks first. With a prefix cache, the first `n_cached` tokens of the prompt were not computed for this
    request. It shares keys and values only with requests of the same `cache_salt`, such as its API key.
    `block_hashes` are the hashes of its full blocks (scheduling/prefix_lookup.py); other requests can find
    the first `n_found` of these blocks.

    With an encoder, `encoder_ids` is the encoder's input, and `prompt_ids` begins the decoder's tokens. A row
    that begins with the first decoder token, also after a loss or a preemption, runs the encoder as well.

    `adapter` is the LoRA adapter that changes its model; None for the model itself.

    With `kv_transfer` its prompt comes from another server, or goes to one (kv_transfer.py).

    `kind` is how the request enters iterations: as a plain row, with a scored output, as a beam search, ...

    With `pooling` it is a request for an embedding, and its one sampled token is ignored. `pooled` is the sum
    of the prompt's final hidden states that have returned so far; for "last" only the last token's.

    `weights_versions` has pairs (number of output tokens, version of the weights): the output from this token
    on was computed by these weights alone.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    end_token_ids: frozenset[int] = frozenset()
    kind: RowKind = PLAIN
    encoder_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None
    constraint: OutputConstraint | None = None
    sink: OutputSink | None = None
    owner: str = ""
    weight: int = 0
    priority: int = 0
    cache_salt: tuple[str, ...] = ()
    adapter: Adapter | None = None
    kv_transfer: KVTransferParams | None = None
    arrival: int = -1
    arrived: float = 0.0
    rank: float = 0.0
    state: RequestState = RequestState.INITIATION
    row: int = -1
    output_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])  # of output_ids, if requested
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt_ids after the first, if requested
    pooled: Vector | None = None
    routed: RoutedTokens | None = None  # experts of the tokens computed so far, if requested
    n_computed: int = 0  # tokens in the K/V cache after all issued iterations
    n_iterations: int = 0  # issued iterations
    n_in_flight: int = 0  # issued and not returned: at most 2, or 1 without overlap
    n_partial: int = 0  # iterations in flight that sample no token: prompt chunks before the last
    n_cached: int = 0
    n_preempted: int = 0
    n_dropped: int = 0  # tokens computed before a preemption, until the request is admitted again
    block_hashes: list[bytes] | None = None  # None: not hashed yet
    asked_blocks: Sequence[bytes] | None = None  # of the disk tier; None: not asked yet
    kv_lease: KVTransferParams | None = None  # for another server, once it may fetch
    n_found: int = 0
    full_at: int = _NEVER  # `n_computed` at which the next block can be found
    n_losses: int = 0
    n_faults: int = 0
    n_stuck: int = 0
    lost_at: int = -1
    alone_until: int = 0
    finish_reason: FinishReason | None = None
    failure: str | None = None
    failure_kind: type[OutputFailed] = OutputFailed
    weights_versions: tuple[tuple[int, int], ...] = ()
    ending: FinishReason | None = None  # asked to end (cancel, timeout); acted on by the scheduler
    most_output: int = field(init=False)  # the most output tokens within `max_tokens`
    token_times: list[float] = field(init=False, default_factory=list[float])  # written by the timeline

    def __post_init__(self) -> None:
        self.most_output = self.max_tokens - len(self.prompt_ids)

    @property
    def n_input(self) -> int:
        """The number of tokens that the user sent; with an encoder, those that it reads."""
        return len(self.encoder_ids or self.prompt_ids)

    @property
    def final_ids(self) -> list[int]:
        """The output tokens that will not change; a beam search has none before it ends."""
        return [] if self.kind.found == () else self.output_ids

    @property
    def score(self) -> float | None:
        """The score of a beam search's best output; None before it is found, and for other requests."""
        found = self.kind.found
        return found[0].score if found else None

    @property
    def n_tokens(self) -> int:
        """Known tokens, input and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def n_tokens_issued(self) -> int:
        """Known tokens plus those that iterations in flight will sample."""
        return len(self.prompt_ids) + len(self.output_ids) + self.n_in_flight - self.n_partial

    @property
    def n_to_compute(self) -> int:
        """Tokens whose keys and values the next iterations must compute."""
        return self.n_tokens_issued - self.n_computed

    @property
    def n_to_encode(self) -> int:
        """Tokens that the encoder reads in its next row."""
        return 0 if self.n_computed else len(self.encoder_ids)

    @property
    def in_initiation(self) -> bool:
        """Whether the next row is in the initiation phase: no token was sampled since the cache was empty.

        timeline.py and select.py inline this expression for speed.
        """
        return self.n_in_flight == self.n_partial and self.state is not _INCREMENT

    def known_ids(self, start: int, stop: int) -> list[int]:
        """The slice `start:stop` of prompt plus output; a scored output is known as a whole."""
        n, output = len(self.prompt_ids), self.kind.scored_ids or self.output_ids
        if start >= n:
            return [*output[start - n : stop - n]]
        return [*self.prompt_ids[start:stop], *output[max(0, start - n) : max(0, stop - n)]]

    def compute_again(self) -> None:
        """Start over after its keys and values were lost: the next iterations compute all known tokens."""
        self.state = RequestState.INITIATION
        self.n_computed = 0
        self.kind.restart(self)
        self.pooled = None  # the whole prompt is pooled again
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids) - 1:
            self.prompt_logprobs = None  # incomplete, of a chunked prompt: all are computed again

    @property
    def weights_version(self) -> int:
        """The version of the weights that computed the newest token, or will compute the first one."""
        versions, n = self.weights_versions or ((0, 0),), len(self.output_ids)
        return next((version for first, version in reversed(versions) if first < n), versions[-1][1])

    def use_weights(self, version: int) -> None:
        """Record that the next tokens are computed by the weights of this version."""
        n = len(self.output_ids)
        before = tuple(pair for pair in self.weights_versions if pair[0] < n)
        if not before or before[-1][1] != version:
            before += ((n, version),)
        self.weights_versions = before

    def continue_from(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        weights_versions: tuple[tuple[int, int], ...],
    ) -> None:
        """Begin with these output tokens, as after a preemption. For a request that is not in the pool yet.

        The versions are those of the weights that computed them. Raises InvalidPrompt if the tokens are a
        complete output.
        """
        for token_id in token_ids:
            if self.accept(token_id) is not None:
                message = (
                    f"the output ends after {len(self.output_ids)} of its {len(token_ids)} tokens, so it "
                )
                raise InvalidPrompt(message + "cannot be continued", param="begun")
        self.logprobs += logprobs
        if token_ids:
            self.weights_versions = weights_versions

    def add_routed(self, first: int, ids: ExpertIds) -> None:
        """Add the experts chosen by an iteration's tokens, which begin at index `first`."""
        if self.state is RequestState.FINISHED:  # the iteration was issued before the end was known
            return
        if self.routed is None:
            self.routed = RoutedTokens()
        self.routed.add(first, ids)

    @property
    def n_routed(self) -> int:
        """The tokens whose experts are known."""
        return 0 if self.routed is None else self.routed.n_tokens

    @property
    def routed_experts(self) -> ExpertIds | None:
        """The experts of all tokens but the last, which is never computed; see `LLM.generate`.

        Fewer if the request ended early; None if they were not requested, or none is known.
        """
        return None if self.routed is None else self.routed.until(self.n_tokens - 1)

    @property
    def pooled_vector(self) -> Vector | None:
        """The pooled hidden states of a request for an embedding that has ended; otherwise None."""
        if self.pooled is None or self.pooling != "mean":
            return self.pooled
        return self.pooled / np.float32(len(self.prompt_ids))

    def accept(self, token_id: int) -> FinishReason | None:
        """Take the token of a returned iteration; returns the finish reason if it is the last token.

        An exception from the sink or the constraint ends only this request, with the reason `error`.
        """
        output_ids = self.output_ids
        output_ids.append(token_id)
        stopped = False
        sink, constraint = self.sink, self.constraint
        if sink is not None or constraint is not None:
            try:
                if sink is not None:
                    stopped = sink.push(token_id)
                if constraint is not None:
                    stopped = constraint.accept(token_id) or stopped
                    if self.failure is None and constraint.failure is not None:
                        self.failure, self.failure_kind = constraint.failure, constraint.failure_kind
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
        if self.failure is not None:
            return FinishReason.ERROR
        if stopped or token_id in self.end_token_ids:
            return FinishReason.STOP
        if len(output_ids) >= self.most_output:
            return FinishReason.LENGTH
        return None

    def accept_all(self, token_ids: Sequence[int]) -> Accepted:
        """Take these tokens up to the first that ends the output; returns them and the finish reason."""
        output_ids = self.output_ids
        is_watched = self.sink is not None or self.constraint is not None or self.failure is not None
        if (
            not is_watched
            and len(output_ids) + len(token_ids) < self.most_output
            and self.end_token_ids.isdisjoint(token_ids)
        ):
            output_ids.extend(token_ids)
            return token_ids, None
        for i, token_id in enumerate(token_ids):
            reason = self.accept(token_id)
            if reason is not None:
                return token_ids[: i + 1], reason
        return token_ids, None


# A request's part in an iteration, and the number n of tokens to compute for it: `n_computed` to
# `n_computed + n` of its prompt and output. If they include the last known token, the next one
# is sampled. A plain tuple, because every request in every iteration makes one, and a NamedTuple takes seven
# times as long to create.
Row = tuple[Request, int]


def prompt_chunk(req: Request, n_tokens: int, start: int | None = None) -> InputRow:
    """The row with `n_tokens` known tokens from `start` on (default: the next ones to compute)."""
    start = req.n_computed if start is None else start
    known = req.known_ids(start, start + n_tokens + 1)
    if len(known) == n_tokens:
        return InputRow(req.row, start, known)
    return InputRow(req.row, start, known[:n_tokens], known[n_tokens], answers=False)


def begin_iteration(rows: Sequence[Row]) -> tuple[list[int], list[Request]]:
    """Record that an iteration over these rows is issued (Algorithm 1, line 7).

    Returns the indices of the rows that sample no token, and the requests that have reached `full_at`. One
    loop handles all rows, because a call for each would take twice as long.
    """
    partial: list[int] = []
    full: list[Request] = []
    for i, (req, n_tokens) in enumerate(rows):
        n_in_flight = req.n_in_flight
        # Request.in_initiation, inlined for speed: an increment always samples.
        if req.state is not _INCREMENT and n_in_flight == req.n_partial and n_tokens < req.n_to_compute:
            partial.append(i)
            req.n_partial += 1
        req.n_iterations += 1
        req.n_in_flight = n_in_flight + 1
        req.state = _RUNNING
        req.n_computed = n_computed = req.n_computed + n_tokens
        if n_computed >= req.full_at:
            full.append(req)
    return partial, full
