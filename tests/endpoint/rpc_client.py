"""A client for Generate over gRPC."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from tests.endpoint.harness import Server
from tests.host.engines import SOON


@dataclass(frozen=True)
class Answer:
    """All messages of a successful call, and its initial metadata."""

    messages: list[pb.GenerateResponse]
    metadata: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.messages)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages for token_id in message.token_ids]

    @property
    def last(self) -> pb.GenerateResponse:
        return self.messages[-1]


@contextmanager
def client(server: Server, options: Sequence[tuple[str, int]] = ()) -> Iterator[GenerationStub]:
    with grpc.insecure_channel(server.grpc_address, options=options) as channel:
        yield GenerationStub(channel)


def connect(stub: GenerationStub) -> None:
    """Open the connection, so that a call with a short deadline does not spend it there."""
    stub.Cancel(pb.CancelRequest(request_id="none"), timeout=SOON)


def asking(text: str = "Go", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


def answer(stub: GenerationStub, request: pb.GenerateRequest) -> Answer:
    call = stub.Generate(request, timeout=SOON)
    return Answer(list(call), dict(call.initial_metadata()))


def refusal(stub: GenerationStub, request: pb.GenerateRequest, **options: Any) -> Any:
    """The error with which a call ends; see its `code()`, `details()` and `trailing_metadata()`."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, **{"timeout": SOON, **options}))
    return caught.value
