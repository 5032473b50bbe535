"""Request ids reused at random from many threads: each call gets exactly its own tokens."""

from typing import Any

import grpc
import pytest

from bench.server.reused_id_calls import (
    MAX_TOKENS,
    Outcomes,
    Share,
    engine_token,
    on_service,
    over_rpc,
    token_of,
)
from bench.server.reused_ids import left, left_at_rest, simulated_service
from orca_jax.service.orca import Orca
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from server.rpc import generation_pb2 as pb
from tests.endpoint.harness import serving
from tests.endpoint.rpc_client import client, refusal
from tests.host.engines import SOON

N_OVER_GRPC = 5_000
N_DIRECT = 40_000


def right(outcomes: Outcomes, n_calls: int) -> None:
    assert outcomes.wrong == []
    assert outcomes.n_wrong == 0
    assert outcomes.n.total() == n_calls


@pytest.mark.long
def test_ids_reused_over_grpc_from_32_threads() -> None:
    engine = SimulatedEngine(VirtualClock(), token=engine_token, n_workers=2)
    with serving(engine=engine) as server:
        outcomes = over_rpc(Share(server.grpc_address, N_OVER_GRPC, n_threads=32, seed=1))
        assert server.service.failure is None
        assert left_at_rest(lambda: left(server.service)) == ""
    right(outcomes, N_OVER_GRPC)
    # Each possible outcome of a call occurred.
    for what in ("read: OK", "read: ALREADY_EXISTS", "cancel: CANCELLED", "hang up: CANCELLED"):
        assert outcomes.n[what] >= 20, outcomes.n
    assert outcomes.n["Cancel: found"] >= 1, outcomes.n


@pytest.mark.long
def test_ids_reused_on_the_service_from_32_threads() -> None:
    with simulated_service() as service:
        outcomes = on_service(service, n_calls=N_DIRECT, seed=1)
        assert left_at_rest(lambda: left(service)) == ""
    right(outcomes, N_DIRECT)
    for what in (
        "result: length",
        "pieces: length",
        "cancel: cancelled",
        "abandon",
        "leave",
        "drop",
        "refused",
    ):
        assert outcomes.n[what] >= 100, outcomes.n


def test_a_live_id_is_rejected_and_a_free_one_accepted_at_once() -> None:
    with serving(seconds=0.01) as server, client(server) as stub:
        request = pb.GenerateRequest(
            request_id="mine",
            token_ids=pb.TokenIds(ids=[7]),
            sampling=pb.SamplingParams(max_tokens=400, temperature=0, ignore_eos=True),
        )
        for _ in range(10):
            first: Any = stub.Generate(request, timeout=SOON)
            next(first)  # the request is live
            for _ in range(3):
                error = refusal(stub, request)
                assert error.code() is grpc.StatusCode.ALREADY_EXISTS
                assert "mine" in error.details()
            next(first)  # and the rejected calls have not ended it
            assert stub.Cancel(pb.CancelRequest(request_id="mine"), timeout=SOON).found
            with pytest.raises(grpc.RpcError) as caught:
                list(first)
            assert caught.value.code() is grpc.StatusCode.CANCELLED  # pyright: ignore[reportAttributeAccessIssue]


# The checks detect the errors they are for.


def checked(token_ids: list[int], *, whole: bool) -> int:
    outcomes = Outcomes()
    outcomes.check("a call", 298, 4, token_ids, whole=whole)
    return outcomes.n_wrong


def test_a_duplicate_lost_or_foreign_token_is_detected() -> None:
    tokens = [token_of(298, i) for i in range(4)]
    assert tokens == [298, 299, 0, 1]
    assert checked(tokens, whole=True) == 0
    for n in range(4):
        assert checked(tokens[:n], whole=False) == 0
        assert checked(tokens[:n], whole=True) == 1  # lost at the end
        assert checked([*tokens[: n + 1], *tokens[n:]], whole=True) == 1  # doubled
        assert checked([*tokens[: n + 1], *tokens[n:]], whole=False) == 1
    assert checked([298, 0], whole=False) == 1  # lost in between
    assert checked([5, 6], whole=False) == 1


class _DoublingEngine(SimulatedEngine):
    """An engine that sometimes delivers a token twice."""

    def __init__(self) -> None:
        super().__init__(
            VirtualClock(), token=lambda req, index: engine_token(req, max(0, index - index // 9))
        )


def test_a_service_that_duplicates_a_token_fails() -> None:
    with serving(engine=_DoublingEngine()) as server:
        outcomes = over_rpc(Share(server.grpc_address, 500, n_threads=8, seed=2))
    assert MAX_TOKENS > 9 and outcomes.n_wrong > 0
    assert "came instead of" in outcomes.wrong[0]


def test_leftover_requests_are_reported() -> None:
    service: Orca = simulated_service()
    assert left(service) == ""
    with service:
        service.scheduler.n_rsrv += 3
        assert left(service) == "3 reserved slots"
        service.scheduler.n_rsrv -= 3
