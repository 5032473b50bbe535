"""Calls that reuse request ids, over gRPC and on the service, with checks of their results.

The engine's tokens are a function of the request (`engine_token`), so a token that is duplicated, lost or
another request's is detected.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc

from orca_jax.errors import InvalidRequest
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import Generation
from orca_jax.service.orca import Orca
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub

N_THREADS = 32
N_IDS_DIRECT = 24
N_IDS = 8  # over gRPC, fewer than threads, so that many calls meet an id that is live or just ending
VOCAB_SIZE = 300
MAX_TOKENS = 12  # of a call that is read to its end
LONGEST = 200
CALL_SECONDS = 30.0
SWITCH_SECONDS = 1e-5  # between threads: finds more interleavings than Python's own 5 ms
_MAX_WRONG = 10
_ID_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("SingleThreadedUnaryStream", 1))


def token_of(start: int, index: int) -> int:
    """The engine's token for a request whose prompt begins with `start`: it identifies the request."""
    return (start + index) % VOCAB_SIZE


def engine_token(request: Request, index: int) -> int:
    """`token_of` as the token function of the simulated engine."""
    return token_of(request.prompt_ids[0], index)


@dataclass(slots=True)
class Outcomes:
    """Counts of calls by their outcome, and the first failures."""

    n: Counter[str] = field(default_factory=Counter[str])
    n_wrong: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def add(self, other: "Outcomes") -> None:
        """Add the counts of `other`."""
        self.n += other.n
        self.n_wrong += other.n_wrong
        self.wrong = (self.wrong + other.wrong)[:_MAX_WRONG]

    def fail(self, message: str) -> None:
        """Record a result that must not happen."""
        self.n_wrong += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(message)

    def check(self, what: str, start: int, n_asked: int, token_ids: Sequence[int], *, whole: bool) -> None:
        """Check the tokens of a call: all of them, or those that arrived before its end."""
        right = [token_of(start, i) for i in range(n_asked if whole else min(len(token_ids), n_asked))]
        if list(token_ids) != right:
            self.fail(f"{what}: {list(token_ids)[:50]} came instead of {right[:50]}")


def in_threads(n_threads: int, seed: int, n_calls: int, call: Callable[..., None]) -> Outcomes:
    """Call `call(rng, outcomes)` from threads, `n_calls` times in total."""
    shares = [Outcomes() for _ in range(n_threads)]

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in range(n_calls // n_threads + (number < n_calls % n_threads)):
            try:
                call(rng, shares[number])
            except Exception as error:
                shares[number].fail(f"{type(error).__name__}: {error}"[:500])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(n_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    whole = Outcomes()
    for share in shares:
        whole.add(share)
    return whole


# Over gRPC.


def rpc_call(stub: GenerationStub, rng: random.Random, outcomes: Outcomes) -> None:
    """One random call. Any Cancel may hit ids that begin with `shared`, none hits the others."""
    number = rng.randrange(N_IDS)
    name = f"{'shared' if number % 3 == 0 else 'own'}-{number}"
    if name.startswith("shared") and rng.random() < 0.2:
        found = stub.Cancel(pb.CancelRequest(request_id=name), timeout=CALL_SECONDS).found
        outcomes.n["Cancel: found" if found else "Cancel: not found"] += 1
        return
    what = rng.choices(("read", "cancel", "hang up", "deadline"), (4, 4, 1, 1))[0]
    # Calls that will be abandoned ask for more tokens, so that they still run then.
    start, n_asked = rng.randrange(VOCAB_SIZE), rng.randint(1, MAX_TOKENS if what == "read" else LONGEST)
    request = pb.GenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(ids=[start, *range(rng.randrange(4))]),
        sampling=pb.SamplingParams(max_tokens=n_asked, temperature=0, ignore_eos=True),
    )
    seconds = 1e-3 + 0.02 * rng.random() ** 2 if what == "deadline" else CALL_SECONDS
    call: Any = stub.Generate(request, timeout=seconds)
    token_ids: list[int] = []
    leaves_after = rng.randint(1, min(n_asked, MAX_TOKENS)) if what == "cancel" else 1 << 30
    if what == "hang up":
        call.cancel()
    reasons: list[int] = []
    try:
        for message in call:
            if message.request_id != name:
                outcomes.fail(f"{name} got a message of {message.request_id}")
            token_ids += message.token_ids
            if message.finish_reason:
                reasons.append(message.finish_reason)
            if len(token_ids) >= leaves_after:
                call.cancel()
                leaves_after = 1 << 30
        code = grpc.StatusCode.OK
    except grpc.RpcError as error:
        code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        expected = {grpc.StatusCode.ALREADY_EXISTS}
        if what in ("cancel", "hang up") or name.startswith("shared"):
            expected.add(grpc.StatusCode.CANCELLED)
        if what == "deadline":
            expected.add(grpc.StatusCode.DEADLINE_EXCEEDED)
        if code not in expected:
            details = error.details()  # pyright: ignore[reportAttributeAccessIssue]
            outcomes.fail(f"{what} {name}: {code.name}: {details}")
        if code is grpc.StatusCode.ALREADY_EXISTS and token_ids:
            outcomes.fail(f"{name} was refused, and got tokens: {token_ids}")
    whole = code is grpc.StatusCode.OK
    if whole and reasons != [pb.FINISH_REASON_LENGTH]:
        outcomes.fail(f"{what} {name} ended well, with the reasons {reasons}")
    outcomes.check(f"{what} {name}", start, n_asked, token_ids, whole=whole)
    outcomes.n[f"{what}: {code.name}"] += 1


@dataclass(frozen=True, slots=True)
class Share:
    """A number of calls to a server from a number of threads."""

    address: str
    n_calls: int
    n_threads: int
    seed: int


def callers(connection: Connection) -> None:
    """For an OtherProcess: answers each Share with Outcomes."""
    while True:
        try:
            share: Share = connection.recv()
        except EOFError:
            return
        connection.send(over_rpc(share))


def over_rpc(share: Share) -> Outcomes:
    """Make the calls of a share on one connection."""
    with grpc.insecure_channel(share.address, options=_ID_OPTIONS) as channel:
        stub = GenerationStub(channel)
        return in_threads(
            share.n_threads, share.seed, share.n_calls, lambda rng, outcomes: rpc_call(stub, rng, outcomes)
        )


# On the service itself.


def direct_call(service: Orca, rng: random.Random, outcomes: Outcomes) -> None:
    """One random request, read whole or in pieces, cancelled, abandoned, closed or dropped."""
    name = f"own-{rng.randrange(N_IDS_DIRECT)}"
    start, n_asked = rng.randrange(VOCAB_SIZE), rng.randint(1, MAX_TOKENS)
    sampling = SamplingParams(max_tokens=n_asked, temperature=0, ignore_eos=True)
    try:
        generation = service.submit([start, *range(rng.randrange(4))], sampling, request_id=name)
    except InvalidRequest as error:
        if error.param != "request_id":
            raise
        outcomes.n["refused"] += 1
        return
    what = rng.choices(("result", "pieces", "cancel", "abandon", "leave", "drop"), (4, 2, 3, 3, 1, 1))[0]
    if what in ("drop", "abandon"):  # the garbage collector ends the first
        if what == "abandon":
            generation.cancel()
        outcomes.n[what] += 1
        return
    if what == "leave":
        with generation:
            generation.next_piece(CALL_SECONDS)
        outcomes.n["leave"] += 1
        return
    if what == "cancel":
        if rng.random() < 0.5:
            generation.next_piece(CALL_SECONDS)
        generation.cancel()
        generation.cancel()  # the second cancel must not hit another request
    token_ids = _pieces(generation) if what == "pieces" else generation.result(CALL_SECONDS).token_ids
    reason = generation.finish_reason
    expected = {FinishReason.LENGTH}
    if what == "cancel":
        expected.add(FinishReason.CANCELLED)
    if reason not in expected:
        outcomes.fail(f"{what} {name} ended with {reason}")
    outcomes.check(f"{what} {name}", start, n_asked, token_ids, whole=reason is FinishReason.LENGTH)
    outcomes.n[f"{what}: {reason}"] += 1


def _pieces(generation: Generation) -> list[int]:
    token_ids: list[int] = []
    while (piece := generation.next_piece(CALL_SECONDS)) is not None:
        token_ids += piece.token_ids
    return token_ids


def on_service(service: Orca, *, n_calls: int, seed: int, n_threads: int = N_THREADS) -> Outcomes:
    """Make requests to a service on an engine with `engine_token`."""
    return in_threads(n_threads, seed, n_calls, lambda rng, outcomes: direct_call(service, rng, outcomes))
