"""`return_routed_experts` over gRPC: a choice's last message has the experts of its tokens."""

import grpc
import pytest

from server.gateway import served_model
from tests.endpoint.harness import serving
from tests.endpoint.routed_model import SPARSE
from tests.endpoint.rpc_client import asking, client, refusal
from tests.host.engines import writing


def test_a_choice_s_last_message_has_the_experts() -> None:
    with serving(writing("ABCDEFGH"), model=SPARSE) as server, client(server) as stub:
        messages = list(stub.Generate(asking("four", n=2, max_tokens=5, return_routed_experts=True)))
        plain = list(stub.Generate(asking("four", max_tokens=5)))
    ends = [message for message in messages if message.finish_reason]
    assert sorted(message.index for message in ends) == [0, 1]
    for message in messages:
        assert message.HasField("routed_experts") == (message in ends)
    for message in ends:
        experts = message.routed_experts
        assert (experts.n_tokens, experts.n_layers, experts.top_k) == (8, 1, 1)
        assert list(experts.ids) == list(range(8))  # the simulated engine says of each token its place
    assert not any(message.HasField("routed_experts") for message in plain)


def test_too_much_and_models_without_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asking("four", max_tokens=5, return_routed_experts=True)
    with serving() as server, client(server) as stub:
        error = refusal(stub, asked)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    monkeypatch.setattr(served_model, "MOST_ROUTED_BYTES", 7)
    with serving(model=SPARSE) as server, client(server) as stub:
        error = refusal(stub, asked)
    assert "an answer may have those of 7 tokens" in (error.details() or "")
