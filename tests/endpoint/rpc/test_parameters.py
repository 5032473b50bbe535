"""Every sampling parameter over gRPC: accepted or rejected by name, and reflected in the output."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest

from orca_jax.errors import OutputFailed, QueueFull
from orca_jax.request.request import Request
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.simulation.engine import simulated_logprobs
from server.rpc import generation_pb2 as pb
from server.rpc.generation_pb2_grpc import GenerationStub
from server.statuses import meaning
from tests.endpoint.harness import END, serving
from tests.endpoint.rpc_client import Answer, answer, asking, client, refusal
from tests.host.engines import SOON, GatedEngine, counting, simulated, writing

# A value that is not the default for each field: as in the message, and as the engine must receive it.
GIVEN: dict[str, Any] = {
    "n": 1,
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.1,
    "top_p": 0.7,
    "top_k": 5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 2.0,
    "logit_bias": {0: -100.0, 299: 0.125},
    "seed": 0,
    "ignore_eos": True,
    "stop": ["x", "yz"],
    "stop_token_ids": [7, 8],
    "allowed_token_ids": pb.TokenIds(ids=[97, 98]),
    "bad_words": ["no", "never"],
    "logprobs": 2,
    "prompt_logprobs": 0,
    "speculative": "off",
    "prediction": "A text",
}
GRAMMARS: dict[str, Any] = {
    "guided_json": '{"type": "object"}',
    "guided_json_object": True,
    "guided_regex": "a+",
    "guided_choice": pb.Texts(texts=["a", "aaaa"]),
    "guided_grammar": 'start: "a"+',
}
BEAMS: dict[str, Any] = {
    "use_beam_search": True,
    "best_of": 3,
    "length_penalty": 0.5,
    "early_stopping": "true",
}
ARRIVES: dict[str, Any] = {
    "stop": ("x", "yz"),
    "stop_token_ids": (7, 8),
    "allowed_token_ids": (97, 98),
    "bad_words": ("no", "never"),
    "guided_choice": ("a", "aaaa"),
}


def test_a_beam_search_is_one_message_for_each_choice() -> None:
    arrived: list[SamplingParams] = []

    def listening(request: Request, index: int) -> int:
        arrived.append(request.sampling)
        return 0

    with serving(listening) as server, client(server) as stub:
        messages = list(stub.Generate(asking(n=2, max_tokens=3, **BEAMS)))
    assert arrived[0] == SamplingParams(n=2, max_tokens=3, **{**BEAMS, "early_stopping": True})
    assert [message.index for message in messages] == [0, 1]
    assert messages[0].score >= messages[1].score  # equal for some seeds of this engine
    assert all(message.finish_reason and message.usage.completion_tokens for message in messages)


@pytest.fixture(scope="module")
def stub() -> Iterator[GenerationStub]:
    with serving(counting) as server, client(server) as stub:
        yield stub


def test_every_parameter_has_a_field_and_every_field_is_tested() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == GIVEN.keys() | GRAMMARS.keys() | BEAMS.keys() | {"return_routed_experts"}


def test_set_fields_reach_the_engine_and_others_get_its_defaults() -> None:
    arrived: list[SamplingParams] = []

    def listening(request: Request, index: int) -> int:
        if index == 0:
            arrived.append(request.sampling)
        return ord("{" if "json" in (request.sampling.grammar or "") else "a")

    requests = [pb.GenerateRequest(text="Go"), asking(**GIVEN)]
    requests += [asking(max_tokens=1, **{name: value}) for name, value in GRAMMARS.items()]
    with serving(listening) as server, client(server) as stub:
        for request in requests:
            answer(stub, request)
    assert arrived[0] == SamplingParams()
    assert arrived[1] == SamplingParams(**{name: ARRIVES.get(name, GIVEN[name]) for name in GIVEN})
    for (name, value), one in zip(GRAMMARS.items(), arrived[2:], strict=True):
        assert one == SamplingParams(max_tokens=1, **{name: ARRIVES.get(name, value)}), name
        assert one.grammar == name


# Invalid values: for each field one that is out of range or wrongly empty.
NAN = float("nan")
BAD: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),  # EndpointOptions's default
    ("n", {"n": (1 << 16) + 1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 511}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
    ("temperature", {"temperature": NAN}),
    ("top_p", {"top_p": 0.0}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": float("-inf")}),
    ("logit_bias", {"logit_bias": {300: 1.0}}),  # the model has 300 tokens
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {5: NAN}}),
    ("logit_bias", {"logit_bias": {5: 100.5}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(4097), 1.0)}),
    ("seed", {"seed": (1 << 63) - 1, "n": 2}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [300]}),
    ("stop_token_ids", {"stop_token_ids": range(257)}),
    ("allowed_token_ids", {"allowed_token_ids": pb.TokenIds()}),
    ("allowed_token_ids", {"allowed_token_ids": pb.TokenIds(ids=[5, 300])}),
    ("allowed_token_ids", {"allowed_token_ids": pb.TokenIds(ids=[97]), "guided_regex": "a"}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": ["x"] * 257}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": "[]"}),
    ("guided_json", {"guided_json": '{"type": "elephant"}'}),
    ("guided_json_object", {"guided_json_object": True, "guided_json": "{}"}),
    ("guided_regex", {"guided_regex": ""}),
    ("guided_regex", {"guided_regex": "("}),
    ("guided_choice", {"guided_choice": pb.Texts()}),
    ("guided_choice", {"guided_choice": pb.Texts(texts=["a"]), "guided_regex": "a"}),
    ("best_of", {"best_of": 2}),
    ("best_of", {"use_beam_search": True, "best_of": 17}),
    ("length_penalty", {"length_penalty": 2.0}),
    ("early_stopping", {"early_stopping": "sometimes"}),
    ("temperature", {"use_beam_search": True, "temperature": 0.5}),
    ("speculative", {"speculative": "on"}),
    ("guided_grammar", {"guided_grammar": "start: nowhere"}),
    ("guided_grammar", {"guided_grammar": 'start: "a"', "guided_choice": pb.Texts(texts=["a"])}),
]  # fmt: skip


def test_every_parameter_is_tried_with_an_invalid_value() -> None:
    # All values of these are valid.
    can_have_none = {"ignore_eos", "use_beam_search", "return_routed_experts", "prediction"}
    assert {param for param, _ in BAD} == {field.name for field in fields(SamplingParams)} - can_have_none


@pytest.mark.parametrize(("param", "sampling"), BAD)
def test_an_invalid_value_is_rejected_by_field_name(
    stub: GenerationStub, param: str, sampling: dict[str, Any]
) -> None:
    error = refusal(stub, asking(**sampling))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["orca-param"] == param
    assert 10 < len(error.details()) < 1000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sampling.111", {"": b"\xf8\x06\x01"}),
        ("sampling.allowed_token_ids.111", {"allowed_token_ids": b"\xf8\x06\x01"}),
        ("sampling.guided_choice.111", {"guided_choice": b"\xf8\x06\x01"}),
    ],
)
def test_an_unknown_field_is_rejected_anywhere(
    stub: GenerationStub, path: str, message: dict[str, bytes]
) -> None:
    sampling = pb.SamplingParams()
    for name, data in message.items():
        (getattr(sampling, name) if name else sampling).MergeFromString(data)
    error = refusal(stub, pb.GenerateRequest(text="Go", sampling=sampling))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["orca-param"] == path


def test_a_model_without_a_tokenizer_rejects_text() -> None:
    prompt = pb.TokenIds(ids=[1])
    with serving(counting, tokenizer=False) as server, client(server) as stub:
        for name in ("stop", "bad_words", *GRAMMARS):
            sampling = pb.SamplingParams(**{name: (GIVEN | GRAMMARS)[name]})
            error = refusal(stub, pb.GenerateRequest(token_ids=prompt, sampling=sampling))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert dict(error.trailing_metadata())["orca-param"] == name


# Effects. This engine has no probabilities to change; the service enforces allowed tokens and ends of output.


def test_stop_tokens_and_min_tokens(stub: GenerationStub) -> None:
    got = answer(stub, asking("A", max_tokens=9, stop_token_ids=[68]))
    assert (got.text, got.last.finish_reason) == ("ABCD", pb.FINISH_REASON_STOP)
    early = answer(stub, asking("A", max_tokens=9, stop=["B", "G"], min_tokens=4))
    assert (early.text, early.last.finish_reason) == ("ABCDEF", pb.FINISH_REASON_STOP)


def test_forbidden_tokens_are_not_generated(stub: GenerationStub) -> None:
    allowed = answer(stub, asking("A", max_tokens=9, allowed_token_ids=pb.TokenIds(ids=[68, 70])))
    assert set(allowed.text) == {"D", "F"} and len(allowed.text) == 9
    without = answer(stub, asking("A", max_tokens=9, bad_words=["BC", "E"]))
    assert "BC" not in without.text and "E" not in without.text and len(without.text) == 9


def test_the_end_of_a_grammar_ends_the_output() -> None:
    with serving(writing("yes!")) as server, client(server) as stub:
        got = answer(stub, asking(guided_choice=pb.Texts(texts=["no", "yes"])))
    assert (got.text, got.last.finish_reason) == ("yes", pb.FINISH_REASON_STOP)


def test_a_failed_output_ends_alone_with_a_status(caplog: pytest.LogCaptureFixture) -> None:
    """This engine ignores the grammar."""
    with serving(engine=simulated(writing("yesterday"))) as server, client(server) as stub:
        error = refusal(stub, asking(guided_regex="yes[0-9]+"))
        assert error.code() is meaning(OutputFailed("")).grpc
        assert answer(stub, asking(max_tokens=9)).text == "yesterday"


def test_too_many_grammars_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise QueueFull("too many grammars are being compiled")

    with serving(writing("aa")) as server, client(server) as stub:
        with monkeypatch.context() as patched:
            patched.setattr(server.service, "rules", full)
            error = refusal(stub, asking(guided_regex="a+", max_tokens=2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "too many grammars are being compiled"
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        assert answer(stub, asking(guided_regex="a+", max_tokens=2)).text == "aa"


# Log-probabilities


def logprobs_of(messages: Any) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(one.token_id, one.logprob, tuple((top.token_id, top.logprob) for top in one.top))
        for one in messages
    ]


def expected(token_ids: list[int], n_top: int) -> list[TokenLogprobs]:
    """The simulated engine's log-probabilities, rounded to float32 as in the message."""
    known = [simulated_logprobs(token_id, n_top) for token_id in token_ids]

    def sent(logprob: float) -> float:
        return float(np.float32(logprob))

    return [
        TokenLogprobs(token_id, sent(logprob), tuple((i, sent(value)) for i, value in top))
        for token_id, logprob, top in known
    ]


def output_logprobs(got: Answer) -> list[TokenLogprobs]:
    return logprobs_of(one for message in got.messages for one in message.logprobs)


@pytest.mark.parametrize("n_top", [0, 1, 20])
def test_each_token_has_logprobs(stub: GenerationStub, n_top: int) -> None:
    got = answer(stub, asking("A", max_tokens=30, logprobs=n_top))
    for message in got.messages:
        assert [one.token_id for one in message.logprobs] == list(message.token_ids)
    assert output_logprobs(got) == expected(list(range(65, 95)), n_top)


def test_an_end_of_sequence_has_logprobs_too() -> None:
    def ending(_: Request, index: int) -> int:
        return [*b"Bye", END][index]

    with serving(ending) as server, client(server) as stub:
        got = answer(stub, asking(logprobs=2))
    assert output_logprobs(got) == expected([*b"Bye", END], 2)


def test_prompt_logprobs_are_sent_once_and_first() -> None:
    engine = GatedEngine()
    with serving(engine=engine) as server, client(server) as stub:
        call = stub.Generate(asking("ABCD", max_tokens=20, prompt_logprobs=3), timeout=SOON)
        engine.let(1)
        messages = [next(call)]
        engine.let(100)
        messages += call
    assert len(messages) > 1
    assert logprobs_of(messages[0].prompt_logprobs) == expected([*b"BCD"], 3)
    assert not any(message.prompt_logprobs for message in messages[1:])
    assert not any(message.logprobs for message in messages)


def test_logprobs_are_sent_only_if_requested(stub: GenerationStub) -> None:
    got = answer(stub, asking("ABCD", max_tokens=5))
    assert not any(message.logprobs or message.prompt_logprobs for message in got.messages)


def test_a_logprob_of_minus_infinity_is_sent() -> None:
    message = pb.GenerateResponse(logprobs=[pb.TokenLogprobs(logprob=-math.inf)])
    assert pb.GenerateResponse.FromString(message.SerializeToString()).logprobs[0].logprob == -math.inf
