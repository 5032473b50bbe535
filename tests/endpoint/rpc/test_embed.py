"""Embed over gRPC, over an engine whose vectors are known."""

from typing import Any

import grpc
import numpy as np
import pytest

from orca_jax.simulation.engine import simulated_vector
from server.rpc import generation_pb2 as pb
from tests.endpoint.harness import Server
from tests.endpoint.rpc_client import client
from tests.host.engines import SOON


def inputs(*given: str | list[int]) -> list[pb.EmbedInput]:
    return [
        pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in given
    ]


def test_vectors_of_texts_and_token_ids(server: Server) -> None:
    with client(server) as stub:
        asked = inputs("one", [*b"two and more"])
        answer = stub.Embed(pb.EmbedRequest(inputs=asked), timeout=SOON)
        assert answer.prompt_tokens == 3 + 12
        for one, text in zip(answer.embeddings, (b"one", b"two and more"), strict=True):
            vector = simulated_vector([*text])
            np.testing.assert_allclose(one.values, vector / np.linalg.norm(vector), atol=1e-6)
        request = pb.EmbedRequest(inputs=asked[:1], pooling="mean", normalize=False, dimensions=3)
        (one,) = stub.Embed(request, timeout=SOON).embeddings
        assert list(one.values) == (simulated_vector([*b"one"]) / np.float32(3))[:3].tolist()
        many = stub.Embed(pb.EmbedRequest(inputs=inputs(*["a"] * 300)), timeout=SOON)
        assert len(many.embeddings) == 300


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "inputs", "inputs has 0 inputs"),
        ({"inputs": [pb.EmbedInput()]}, "inputs.0", "neither text nor token_ids"),
        ({"inputs": inputs("a"), "dimensions": 9}, "dimensions", "dimensions is 9; it must be from 1 to 8"),
        ({"inputs": inputs("a"), "pooling": "max"}, "pooling", "pooling is 'max'"),
        ({"inputs": inputs("a"), "priority": 1}, "priority", "priority is 1"),
        (
            {"inputs": [pb.EmbedInput.FromString(b"\x0a\x01a\xf8\x06\x01")]},
            "inputs.0.111",
            "no field of the number",
        ),
    ],
)
def test_mistakes_are_named(server: Server, fields: dict[str, Any], param: str, message: str) -> None:
    with client(server) as stub, pytest.raises(grpc.RpcError) as error:
        stub.Embed(pb.EmbedRequest(**fields), timeout=SOON)
    call: Any = error.value
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT and message in call.details()
    assert dict(call.trailing_metadata())["orca-param"] == param
