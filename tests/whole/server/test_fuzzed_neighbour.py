"""A tenant sends fuzzed requests over HTTP and gRPC to the real engine; another tenant notices nothing.

Over gRPC both tenants send them, and both watch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from schemathesis import Case
from schemathesis.specs.openapi.checks import negative_data_rejection

from orca_jax import LLM
from server.rpc import generation_pb2 as pb
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import TEMPLATE, Server, serving_model, until
from tests.endpoint.load.test_fuzz import (
    CALL_SECONDS,
    CHECKS,
    GENERATING,
    NEGATIVE,
    POSITIVE,
    Calls,
    asking_for_little,
    generated,
)
from tests.whole.server.watcher import PROMPT, REQUEST_ID, Watcher
from tests.whole.server.wire_messages import messages

WATCHER, FUZZER = "the-watcher's-key", "the-fuzzer's-key"
# The request ids that the watchers of the two tenants use. They are of one length, so that one can replace
# the other in an encoded message.
IDS = {WATCHER: REQUEST_ID, FUZZER: "order-71"}
N_OPERATIONS = 19 + 9 + 2  # those of batches and of the live view
WITHOUT_END = "/live/events"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_batch_size=4, max_batch_tokens=64, n_slots=4096) as llm:
        yield llm


@contextmanager
def watched(
    llm: LLM, folder: Path, watching: Sequence[str] = (WATCHER,)
) -> Iterator[tuple[Server, list[Watcher]]]:
    """A server with two tenants, of which those `watching` watch.

    On exit it checks what they saw, and that nothing is left.
    """
    options = EndpointOptions(
        **{"port": 0, "grpc_port": 0, "access_log": "off", "max_choices": 8, "batch_dir": folder}
    )
    with (
        serving_model(
            llm.service,
            llm.config,
            llm.serving,
            name="demo",
            tokenizer=llm.tokenizer,
            chat_template=TEMPLATE,
            options=options,
            keys=ApiKeys([WATCHER, FUZZER]),
        ) as server,
    ):
        watchers = [Watcher(server, key, IDS[key]) for key in watching]
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher)
            yield server, watchers
            for watcher in watchers:
                watcher.finish()
        # The watchers have ended: while they watch, rest is only between their rounds.
        assert [watcher.wrong for watcher in watchers] == [[] for _ in watchers]
        until(server.at_rest, "rest")
        assert llm.service.failure is None and llm.service.recovery.losses == 0


class CallsWithKey(Calls):
    """Sends each case with the fuzzer's key, so that a case drawn without a key may be valid."""

    def send(self, case: Case) -> None:
        headers = {"Connection": "close", "Authorization": f"Bearer {FUZZER}"}
        response = case.call(timeout=CALL_SECONDS, headers=headers)
        self.answers[case.operation.path, response.status_code] += 1
        case.validate_response(response, checks=[one for one in CHECKS if one is not negative_data_rejection])


def fuzz_http(server: Server, n: int) -> Calls:
    """Send about `n` valid and `n` invalid cases of each operation, and as many that run."""
    calls = CallsWithKey(server, N_OPERATIONS)
    document = requests.get(f"{server.url}/openapi.json", timeout=CALL_SECONDS).json()
    for operation in calls.operations:
        if operation.path != WITHOUT_END:
            calls.fuzz_operation(operation, POSITIVE, n)
            if operation.body or operation.query or operation.path_parameters:
                calls.fuzz_operation(operation, NEGATIVE, n)
    for path in GENERATING:
        calls.fuzz(path, POSITIVE, 2 * n, asking_for_little(document))
    return calls


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.long)])
def test_requests_from_the_document_touch_no_other_tenant(llm: LLM, tmp_path: Path, n: int) -> None:
    with watched(llm, tmp_path) as (server, (watcher,)):
        calls = fuzz_http(server, n)
    assert watcher.n >= 1 and calls.n >= 34 * n
    assert sum(calls.answers[path, 200] for path in GENERATING) > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_requests_from_the_document_touch_no_other_tenant(llm: LLM, tmp_path: Path) -> None:
    with watched(llm, tmp_path) as (server, (watcher,)):
        calls = fuzz_http(server, 60)
    assert watcher.n >= 20 and calls.n >= 2_000
    assert all(calls.answers[path, 200] >= 20 for path in GENERATING)


@dataclass(frozen=True)
class Rpc:
    """A method by its full name, with its request's descriptor and valid requests."""

    name: str
    kind: Any
    beginnings: tuple[bytes, ...]
    endless: bool = False  # its answers have no end of their own


def _requests_of(kind: Any, *some: dict[str, Any]) -> tuple[bytes, ...]:
    return tuple(kind(**each).SerializeToString() for each in some)


def rpcs() -> list[Rpc]:
    """All methods of the server, by the descriptors of its services."""
    little = pb.SamplingParams(max_tokens=3)
    named = {"text": PROMPT, "request_id": REQUEST_ID, "sampling": little}
    several = {"text": PROMPT, "sampling": pb.SamplingParams(max_tokens=40, n=3)}
    ids = {"token_ids": pb.TokenIds(ids=[5, 6, 7]), "sampling": little}
    beginnings = {
        "Generate": _requests_of(pb.GenerateRequest, named, named, several, ids, {}),
        "Cancel": _requests_of(pb.CancelRequest, {"request_id": REQUEST_ID}, {}),
        "Embed": _requests_of(pb.EmbedRequest, {"inputs": [pb.EmbedInput(text=PROMPT)]}, {}),
        "Models": (b"",),
        "Check": _requests_of(health_pb2.HealthCheckRequest, {}, {"service": "orca.v1.Generation"}),
        "Watch": _requests_of(health_pb2.HealthCheckRequest, {}, {"service": "none"}),
        "List": (b"",),
        "ServerReflectionInfo": _requests_of(
            reflection_pb2.ServerReflectionRequest,
            {"list_services": ""},
            {"file_containing_symbol": "orca.v1.Generation"},
        ),
    }
    return [
        Rpc(
            f"/{service.full_name}/{method.name}",
            method.input_type,
            beginnings[method.name],
            method.name == "Watch",
        )
        for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    ]


@dataclass(frozen=True)
class Call:
    """One call: its messages as bytes, when the client leaves, and its metadata."""

    rpc: Rpc
    messages: list[bytes]
    leaves_after: int | None  # answers; None: at the end
    seconds: float
    metadata: list[tuple[str, str]]


@st.composite
def calls(draw: DrawFn) -> Call:
    every = rpcs()
    rpc = draw(st.sampled_from([*every, *(one for one in every if one.name.endswith("/Generate"))]))
    n_messages = draw(st.sampled_from((1,) * 8 + (0, 2, 3)))
    leaves_after = draw(st.sampled_from((None, None, None, 0, 0, 1, 2, 5)))
    if rpc.endless:
        leaves_after = min(leaves_after or 0, 1)
    seconds = draw(st.sampled_from((CALL_SECONDS,) * 6 + (0.001, 0.01, 0.1)))
    key = draw(st.sampled_from((FUZZER, WATCHER) * 6 + ("wrong", None)))
    # A tenant that used its own watcher's id would disturb that one rightly.
    victim = IDS[FUZZER if key == WATCHER else WATCHER].encode()
    drawn = [draw(messages(rpc.kind, rpc.beginnings)) for _ in range(n_messages)]
    return Call(
        rpc,
        [message.replace(REQUEST_ID.encode(), victim) for message in drawn],
        leaves_after,
        seconds,
        [] if key is None else [("authorization", f"Bearer {key}")],
    )


# A client's mistakes, its leaving, and its share; everything else would be a fault of the server.
EXPECTED = {
    *("OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"),
    *("CANCELLED", "DEADLINE_EXCEEDED"),
}


def outcome(channel: grpc.Channel, call: Call) -> str:
    """Make a call, which the client leaves at the drawn moment; return its status."""
    begin: Any = channel.stream_stream(call.rpc.name)
    running = begin(iter(call.messages), metadata=call.metadata, timeout=call.seconds)
    try:
        for i, _ in enumerate(running if call.leaves_after != 0 else ()):
            if i + 1 == call.leaves_after:
                break
    except grpc.RpcError:
        pass
    if call.leaves_after is not None:
        running.cancel()
    return running.code().name


def fuzz_grpc(server: Server, n: int, seed_of_draws: int) -> Counter[tuple[str, str]]:
    """Make `n` drawn calls, and count how often each method ended with each status."""
    ended = Counter[tuple[str, str]]()
    with grpc.insecure_channel(server.grpc_address) as channel:

        @seed(seed_of_draws)
        @settings(generated, max_examples=n)
        @given(call=calls())
        def run(call: Call) -> None:
            code = outcome(channel, call)
            name = call.rpc.name.rpartition("/")[2]
            ended[name, code] += 1
            assert code in EXPECTED, (code, call)

        run()
    return ended


def test_calls_from_the_descriptors_of_each_tenant_do_not_touch_the_other(llm: LLM, tmp_path: Path) -> None:
    with watched(llm, tmp_path, (WATCHER, FUZZER)) as (server, watchers):
        ended = fuzz_grpc(server, 150, seed_of_draws=1)
    assert min(watcher.n for watcher in watchers) >= 1
    check_use(ended)


def check_use(ended: Counter[tuple[str, str]]) -> None:
    """Check that every method was called, with all outcomes."""
    assert {name for name, _ in ended} == {one.name.rpartition("/")[2] for one in rpcs()}
    codes = Counter[str]()
    for (_, code), n in ended.items():
        codes[code] += n
    assert min(codes[code] for code in ("OK", "INVALID_ARGUMENT", "CANCELLED", "UNAUTHENTICATED")) > 0
    assert ended["Generate", "OK"] + ended["Generate", "CANCELLED"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed_of_draws", range(2, 6))
def test_many_calls_from_the_descriptors_of_each_tenant_do_not_touch_the_other(
    llm: LLM, tmp_path: Path, seed_of_draws: int
) -> None:
    with watched(llm, tmp_path, (WATCHER, FUZZER)) as (server, watchers):
        ended = fuzz_grpc(server, 1_500, seed_of_draws)
    assert min(watcher.n for watcher in watchers) >= 5
    check_use(ended)
    print(dict(ended))
