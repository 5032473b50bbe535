"""Counting a message's fields before it is parsed, checked against known messages and over gRPC."""

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.errors import InvalidRequest
from server.rpc import field_count, messages
from server.rpc import generation_pb2 as pb
from server.rpc.field_count import has_too_long_list, has_too_many_fields
from tests.endpoint.harness import serving

KIND = pb.GenerateRequest.DESCRIPTOR
GENERATE = "/orca.v1.Generation/Generate"

texts = st.lists(st.text(max_size=3), max_size=6)
requests = st.builds(
    pb.GenerateRequest,
    request_id=st.text(max_size=3),
    text=st.text(max_size=3),
    sampling=st.builds(
        pb.SamplingParams,
        stop=texts,
        bad_words=texts,
        stop_token_ids=st.lists(st.integers(1, 300), max_size=9),
        logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100, 100), max_size=5),
        allowed_token_ids=st.none() | st.builds(pb.TokenIds, ids=st.lists(st.integers(0, 300), max_size=9)),
        guided_choice=st.none() | st.builds(pb.Texts, texts=texts),
        temperature=st.none() | st.floats(0, 1),
        seed=st.none() | st.integers(-5, 5),
    ),
)


def n_fields(message: Message) -> int:
    """The number of encoded fields: a packed list is one, any other list has one per element."""
    n = 0
    for field, value in message.ListFields():
        if isinstance(value, pb.SamplingParams | pb.Texts):
            n += 1 + n_fields(value)
        elif field.name in ("stop", "bad_words", "texts", "logit_bias"):
            n += len(value)
        else:
            n += 1
    return n


@given(requests)
def test_the_count_is_exact(request: pb.GenerateRequest) -> None:
    data, n = request.SerializeToString(), n_fields(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_count, "MAX_FIELDS", n)
        assert not has_too_many_fields(KIND, data)
        patch.setattr(field_count, "MAX_FIELDS", n - 1)
        assert has_too_many_fields(KIND, data) == (n > 0)


@given(st.binary(max_size=60))
def test_malformed_data_is_left_to_the_parser(data: bytes) -> None:
    assert not has_too_many_fields(KIND, data)


STOP = pb.SamplingParams(stop=[""]).SerializeToString()
TOO_MANY = {
    "stops": pb.GenerateRequest(text="a").SerializeToString()
    + pb.GenerateRequest(sampling=pb.SamplingParams(stop=["x"] * 20_000)).SerializeToString(),
    "sampling": pb.GenerateRequest(sampling=pb.SamplingParams(stop=["x"])).SerializeToString() * 10_000,
    "not known": b"\xf8\x01\x01" * 20_000,
    "groups": b"\xfb\x01\xfc\x01" * 10_000,
    "choices": pb.GenerateRequest(
        sampling=pb.SamplingParams(guided_choice=pb.Texts(texts=["x"] * 20_000))
    ).SerializeToString(),
}


@pytest.mark.parametrize("data", TOO_MANY.values(), ids=TOO_MANY)
def test_too_many_fields_are_rejected_unparsed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server, grpc.insecure_channel(server.grpc_address) as channel:
        monkeypatch.setattr(messages, "_refuse_unknown_fields", None)  # no call reaches the parser
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(GENERATE)(data, timeout=30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message has more than 16384 fields; send less"


@pytest.mark.parametrize("split", [1, 3])
def test_long_lists_are_rejected_unparsed(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of its own, one within another message, and small numbers beside numbers of five bytes."""
    monkeypatch.setattr(field_count, "MAX_NUMBERS", 9)
    monkeypatch.setattr(messages, "MAX_NUMBERS", 9)

    def sampling(n: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            text="a" * 20, sampling=pb.SamplingParams(stop_token_ids=[2**30, 3] * split + [1] * n)
        )

    def allowed(n: int) -> pb.GenerateRequest:
        ids = pb.TokenIds(ids=[2**30, 3] * split + [1] * n)
        return pb.GenerateRequest(sampling=pb.SamplingParams(allowed_token_ids=ids))

    for make in (sampling, allowed):
        for n in range(20):
            data = make(n).SerializeToString()
            slack = 2 if make is sampling else 0  # a bare list's head is not among its bytes
            assert has_too_long_list(KIND, data) == (2 * split + n > 9 + slack), n
    with pytest.raises(InvalidRequest, match="more than 9 numbers"):
        messages.parsed(pb.GenerateRequest, allowed(20).SerializeToString())


def test_packed_numbers_are_one_field() -> None:
    with serving() as server, grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_stream(GENERATE)
        for ids, message in (
            ([5] * 200_000, "200000 tokens"),
            ([200] * 1_000_000, "1000000 tokens"),
            ([200] * 1_000_001, "has more than 1000000 numbers"),
        ):
            data = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)).SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                list(call(data, timeout=30))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in (caught.value.details() or "")
