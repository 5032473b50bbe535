"""Log-probabilities and `echo`, requested with OpenAI's client.

The engine gives each token the probability 1/2, the next id 1/4, the one after it 1/8.
"""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers, processors

from orca_jax.request.request import Request
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.simulation import engine as simulated_engine
from tests.endpoint.harness import CONFIG, END, MODEL, serving, serving_model
from tests.endpoint.http_client import error_of
from tests.endpoint.openai_client import client_of
from tests.host.engines import SOON, GatedEngine, orca, simulated

USER: Any = {"role": "user", "content": "Hi"}
LN2 = math.log(2)
HALF, QUARTER = -LN2, -2 * LN2


class Scripts:
    """An engine's tokens, scripted per prompt by its first token, followed by end of sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def __call__(self, request: Request, index: int) -> int:
        script = self.tokens.get(request.prompt_ids[0], [*b"abcdefgh"])
        return script[index] if index < len(script) else END


@pytest.fixture(scope="module")
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def http(scripts: Scripts) -> Iterator[httpx2.Client]:
    with serving(scripts) as server, httpx2.Client(base_url=server.url, timeout=SOON) as http:
        yield http


@pytest.fixture(scope="module")
def client(http: httpx2.Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=SOON) as client:
        yield client


def complete(client: OpenAI, prompt: Any = "?", **fields: Any) -> Any:
    return client.completions.create(model="test", prompt=prompt, **{"max_tokens": 3, **fields})


def events(text: str) -> list[Any]:
    *lines, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# Completions


def test_a_completions_logprobs(client: OpenAI) -> None:
    (choice,) = complete(client, logprobs=2).choices
    logprobs = choice.logprobs
    assert choice.text == "abc"
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == pytest.approx([HALF] * 3)
    assert [list(top) for top in logprobs.top_logprobs] == [["a", "b"], ["b", "c"], ["c", "d"]]
    assert all(list(top.values()) == pytest.approx([HALF, QUARTER]) for top in logprobs.top_logprobs)


def test_logprobs_0_returns_the_token_itself(client: OpenAI) -> None:
    logprobs = complete(client, logprobs=0).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([HALF] * 3)
    assert logprobs.top_logprobs == [
        {"a": pytest.approx(HALF)},
        {"b": pytest.approx(HALF)},
        {"c": pytest.approx(HALF)},
    ]


def test_a_prompts_logprobs_in_vllms_form(http: httpx2.Client) -> None:
    """All choices of a prompt have the same: by token id, in a list whose first element is null."""

    def entry(logprob: float, rank: int | None, token: str) -> dict[str, Any]:
        return {"logprob": pytest.approx(logprob), "rank": rank, "decoded_token": token}

    expected = [None, {"98": entry(HALF, 1, "b"), "99": entry(QUARTER, 2, "c")}]
    body: dict[str, Any] = {"prompt": ["ab", "b"], "n": 2, "max_tokens": 2, "prompt_logprobs": 2}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected, [None], [None]]
    assert all(choice["logprobs"] is None for choice in choices)
    (choice,) = http.post(
        "/v1/completions", json=body | {"prompt": "ab", "n": 1, "prompt_logprobs": 0, "logprobs": 1}
    ).json()["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": entry(HALF, None, "b")}]
    assert choice["logprobs"]["tokens"] == [*choice["text"]]  # without echo those of the output alone
    chat: dict[str, Any] = {"messages": [USER], "max_tokens": 1, "prompt_logprobs": 1}
    whole = http.post("/v1/chat/completions", json=chat).json()
    first, *scored = whole["prompt_logprobs"]
    assert first is None and len(scored) == whole["usage"]["prompt_tokens"] - 1
    assert all(one[token] == entry(HALF, 1, one[token]["decoded_token"]) for one in scored for token in one)
    assert "prompt_logprobs" not in whole["choices"][0]


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("completions", {"prompt": "a", "stream": True}, "stream and prompt_logprobs are both given"),
        ("chat/completions", {"messages": [USER], "stream": True}, "stream and prompt_logprobs"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1}, "with echo logprobs is 1"),
    ],
)
def test_prompt_logprobs_that_cannot_be_returned_are_refused(
    http: httpx2.Client, path: str, fields: dict[str, Any], says: str
) -> None:
    answer = http.post(f"/v1/{path}", json=fields | {"prompt_logprobs": 2})
    assert answer.status_code == 400 and says in error_of(answer)["message"]
    assert error_of(answer)["param"] == "prompt_logprobs"


def test_a_less_likely_token_comes_after_the_most_likely_ones(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlikely(token_id: int, n_top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -9.0, tuple((ord("x") + i, -1.0 - i) for i in range(n_top)))

    monkeypatch.setattr(simulated_engine, "simulated_logprobs", unlikely)
    logprobs = complete(client, logprobs=2, max_tokens=1).choices[0].logprobs
    assert list(logprobs.top_logprobs[0].items()) == [("x", -1.0), ("y", -2.0), ("a", -9.0)]
    chat = client.chat.completions.create(
        model="test", messages=[USER], max_tokens=1, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert [each.token for each in chat.choices[0].logprobs.content[0].top_logprobs] == ["x", "y"]


def test_a_logprob_of_minus_infinity_becomes_a_number(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_logprobs(token_id: int, n_top: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -math.inf, ((token_id + 1, -math.inf),) * n_top)

    monkeypatch.setattr(simulated_engine, "simulated_logprobs", no_logprobs)
    logprobs = complete(client, logprobs=1, max_tokens=1, echo=True).choices[0].logprobs
    assert logprobs.token_logprobs == [None, -9999.0]
    assert logprobs.top_logprobs == [None, {"b": -9999.0, "a": -9999.0}]
    for stream in complete(client, logprobs=1, max_tokens=1, stream=True):
        assert stream.choices[0].logprobs.token_logprobs == [-9999.0]
    answer = client.chat.completions.create(model="test", messages=[USER], max_tokens=1, logprobs=True)
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0


def test_without_a_request_no_logprobs_are_returned(http: httpx2.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "?", "logprobs": False}),
        ("/v1/completions", {"prompt": "?", "logprobs": None, "echo": True}),
        ("/v1/chat/completions", {"messages": [USER], "logprobs": False, "top_logprobs": 0}),
    ):
        for choice in http.post(path, json={**body, "max_tokens": 2}).json()["choices"]:
            assert choice["logprobs"] is None
        for event in events(http.post(path, json={**body, "max_tokens": 2, "stream": True}).text):
            assert event["choices"][0]["logprobs"] is None


# Which tokens are included


@pytest.mark.parametrize(
    "tokens, fields, text, reason, shown",
    [
        ([*b"ab", END], {}, "ab", "stop", ["a", "b"]),
        ([*b"ab", END], {"ignore_eos": True}, "ab", "length", ["a", "b", f"token_id:{END}"]),
        ([*b"a", END, *b"b"], {"ignore_eos": True}, "ab", "length", ["a", f"token_id:{END}", "b"]),
        ([END], {}, "", "stop", []),
        ([*b"xGod"], {"stop": ["God"], "max_tokens": 9}, "x", "stop", ["x"]),
        ([*b"God"], {"stop": ["God"], "max_tokens": 9}, "", "stop", []),
        ([*b"xGo"], {"stop": ["God"]}, "xGo", "length", ["x", "G", "o"]),
        ([*b"xyz"], {"stop_token_ids": [ord("y")]}, "xy", "stop", ["x", "y"]),
        ([*"a😀".encode()], {"max_tokens": 3}, "a\ufffd", "length", ["a", r"bytes:\xf0", r"bytes:\x9f"]),
    ],
)
def test_tokens_without_text_are_included_only_at_full_length(
    client: OpenAI,
    scripts: Scripts,
    tokens: list[int],
    fields: dict[str, Any],
    text: str,
    reason: str,
    shown: list[str],
) -> None:
    scripts.tokens[1] = tokens
    body = {"max_tokens": 3, **fields}
    extra = {name: body.pop(name) for name in ("ignore_eos", "stop_token_ids") if name in body}
    (choice,) = complete(client, [1], logprobs=0, extra_body=extra, **body).choices
    assert (choice.text, choice.finish_reason, choice.logprobs.tokens) == (text, reason, shown)


def test_a_character_of_four_tokens_has_one_offset_and_is_not_split(client: OpenAI, scripts: Scripts) -> None:
    scripts.tokens[1] = [*"é😀z".encode()]
    (choice,) = complete(client, [1], logprobs=0, max_tokens=7).choices
    assert choice.text == "é😀z"
    assert choice.logprobs.tokens == [
        *(r"bytes:\xc3", r"bytes:\xa9"),
        *(r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"),
        "z",
    ]
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 1, 1, 2]


# Streams


def test_logprobs_are_sent_with_the_text_of_their_tokens() -> None:
    engine = GatedEngine(lambda _, index: "a€stop!".encode()[index])
    with serving(engine=engine) as server, client_of(server) as client:
        try:
            with complete(client, max_tokens=9, logprobs=0, stop=["stop!"], stream=True) as stream:
                engine.let(1)
                first = next(stream).choices[0]
                assert (first.text, first.logprobs.tokens) == ("a", ["a"])
                engine.let(3)
                second = next(stream).choices[0]
                assert (second.text, second.logprobs.text_offset) == ("€", [1, 1, 1])
                engine.let(5)
                last = next(stream).choices[0]
                assert (last.text, last.finish_reason, last.logprobs) == ("", "stop", None)
        finally:
            engine.let(1000)


# Bytes of words, of split characters, of invalid UTF-8, and end of sequence.
TOKENS = st.lists(st.sampled_from([*b"aab", *"é€😀".encode(), 0xFF, 0x80, END]), min_size=1, max_size=16)
STOPS = st.lists(st.text(st.sampled_from("aabé€😀\ufffd"), min_size=1, max_size=4), max_size=2)


@given(tokens=TOKENS, stops=STOPS, n_more=st.integers(0, 2), echo=st.booleans(), ignore_eos=st.booleans())
def test_a_stream_has_the_logprobs_of_a_complete_response(
    http: httpx2.Client,
    scripts: Scripts,
    tokens: list[int],
    stops: list[str],
    n_more: int,
    echo: bool,
    ignore_eos: bool,
) -> None:
    scripts.tokens[ord("P")] = tokens
    body = {"prompt": "Pé", "max_tokens": len(tokens) + n_more, "stop": stops, "ignore_eos": ignore_eos}
    body |= {"logprobs": 1, "echo": echo}
    (whole,) = http.post("/v1/completions", json=body).json()["choices"]
    chunks = [
        event["choices"][0]
        for event in events(http.post("/v1/completions", json={**body, "stream": True}).text)
    ]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    n_text = 0
    for chunk in chunks:
        n_text += len(chunk["text"])
        assert (
            chunk["logprobs"] is None
            or all(at < n_text for at in chunk["logprobs"]["text_offset"])
            or chunk["finish_reason"] == "length"
        )
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        logprobs = [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]]
        assert logprobs == whole["logprobs"][name]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    scripts.tokens[ord("<")] = tokens
    chat |= {name: body[name] for name in ("max_tokens", "stop", "ignore_eos")}
    (answer,) = http.post("/v1/chat/completions", json=chat).json()["choices"]
    streamed = [
        event["choices"][0]
        for event in events(http.post("/v1/chat/completions", json={**chat, "stream": True}).text)
    ]
    del scripts.tokens[ord("<")]
    logprobs = [each for chunk in streamed if chunk["logprobs"] for each in chunk["logprobs"]["content"]]
    assert logprobs == answer["logprobs"]["content"]
    shown = bytes(itertools.chain.from_iterable(each["bytes"] or [] for each in logprobs))
    assert shown.decode("utf-8", "replace").startswith(answer["message"]["content"])


# Chat


def test_a_chat_has_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="test", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].message.content == "ab"
    assert logprobs and logprobs.content and logprobs.refusal is None
    assert [(token.token, token.bytes) for token in logprobs.content] == [("a", [97]), ("b", [98])]
    assert [token.logprob for token in logprobs.content] == pytest.approx([HALF] * 2)
    (first, second), _ = (token.top_logprobs for token in logprobs.content)
    assert [(token.token, token.bytes) for token in (first, second)] == [("a", [97]), ("b", [98])]
    assert [first.logprob, second.logprob] == pytest.approx([HALF, QUARTER])


def test_chat_logprobs_without_top_logprobs(client: OpenAI, scripts: Scripts) -> None:
    scripts.tokens[ord("<")] = [*"é".encode(), END, ord("x")]
    answer = client.chat.completions.create(
        model="test", messages=[USER], max_tokens=4, logprobs=True, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    assert [(token.token, token.bytes, token.top_logprobs) for token in logprobs.content] == [
        (r"bytes:\xc3", [0xC3], []),
        (r"bytes:\xa9", [0xA9], []),
        (f"token_id:{END}", None, []),
        ("x", [ord("x")], []),
    ]
    del scripts.tokens[ord("<")]


def test_openais_stream_accumulator_accepts_logprobs() -> None:
    def token(_: Request, index: int) -> int:
        return END if index == 4 else ord("a") + index

    with (
        serving(token, seconds=0.002) as server,
        client_of(server) as client,
        client.chat.completions.stream(
            model="test", messages=[USER], max_tokens=9, logprobs=True, top_logprobs=1
        ) as stream,
    ):
        # With several choices the client would take some log-probabilities twice.
        logprobs = stream.get_final_completion().choices[0].logprobs
    assert logprobs and logprobs.content
    assert [token.token for token in logprobs.content] == [*"abcd"]
    assert [token.top_logprobs[0].token for token in logprobs.content] == [*"abcd"]


# Echo


@pytest.mark.parametrize(
    "prompt, texts",
    [
        ("Sé: ", ["Sé: "]),
        (["x", "Sé: "], ["x", "Sé: "]),
        ([*"Sé: ".encode()], ["Sé: "]),
        ([[*b"x"], [0xFF, *b"y", END]], ["x", "\ufffdy"]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_echo_returns_the_prompt_before_every_choice(
    client: OpenAI, prompt: Any, texts: list[str], n: int
) -> None:
    answer = complete(client, prompt, echo=True, n=n)
    assert [choice.text for choice in answer.choices] == [text + "abc" for text in texts for _ in range(n)]
    assert answer.usage.completion_tokens == 3 * n * len(texts)
    streamed = [""] * len(answer.choices)
    first = dict[int, str]()
    for chunk in complete(client, prompt, echo=True, n=n, stream=True):
        (choice,) = chunk.choices
        first.setdefault(choice.index, choice.text)
        streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]
    assert all(first[i].startswith(text) for i, text in enumerate(t for t in texts for _ in range(n)))


def test_echo_logprobs_begin_with_the_prompts(client: OpenAI) -> None:
    (choice,) = complete(client, "é?", echo=True, logprobs=1, max_tokens=2).choices
    assert choice.text == "é?ab"
    logprobs = choice.logprobs
    assert logprobs.tokens == [r"bytes:\xc3", r"bytes:\xa9", "?", "a", "b"]
    assert logprobs.text_offset == [0, 0, 1, 2, 3]
    assert logprobs.token_logprobs == [None, *[pytest.approx(HALF)] * 4]
    assert logprobs.top_logprobs[0] is None
    assert [list(top) for top in logprobs.top_logprobs[1:]] == [[r"bytes:\xa9"], ["?"], ["a"], ["b"]]


def test_a_prompt_of_one_token_has_no_logprob(client: OpenAI) -> None:
    logprobs = complete(client, "x", echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs) == (["x", "a"], [None, pytest.approx(HALF)])


def test_the_prompt_does_not_wait_for_output_text() -> None:
    engine = GatedEngine(lambda _, index: "é".encode()[index])
    with serving(engine=engine) as server, client_of(server) as client:
        try:
            with complete(client, "xy", max_tokens=2, logprobs=0, echo=True, stream=True) as stream:
                engine.let(1)
                first = next(stream).choices[0]
                assert (first.text, first.logprobs.tokens, first.finish_reason) == ("xy", ["x", "y"], None)
                engine.let(1)
                last = next(stream).choices[0]
                assert (last.text, last.logprobs.text_offset, last.finish_reason) == ("é", [2, 2], "length")
        finally:
            engine.let(1000)


@pytest.mark.parametrize("script", [[*b"abc"], [END], [0xC3]])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_0_scores_only_the_prompt(
    client: OpenAI, scripts: Scripts, script: list[int], name: str
) -> None:
    scripts.tokens[ord("P")] = script
    fields: Any = {"max_tokens": None, "echo": True, "n": 2, "extra_body": {name: 0}}
    for logprobs in (None, 1):
        answer = complete(client, "Pxy", logprobs=logprobs, **fields)
        stream = list(complete(client, "Pxy", logprobs=logprobs, stream=True, **fields))
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert sorted(chunk.choices[0].index for chunk in stream) == [0, 1]
        for choice in (*answer.choices, *(chunk.choices[0] for chunk in stream)):
            assert (choice.text, choice.finish_reason) == ("Pxy", "length")
            assert choice.logprobs is None if logprobs is None else choice.logprobs.tokens == ["P", "x", "y"]


def test_max_tokens_0_counts_no_output_tokens(http: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "xy", "echo": True, "max_tokens": 0, "stream": True, "stream_options": options}
    for event in events(http.post("/v1/completions", json=body).text):
        counts = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
        assert event["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": 0, "max_completion_tokens": 1, "echo": True}, "max_completion_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "prompt": ""}, "prompt"),
        ({"echo": True, "prompt": [300]}, "prompt"),
    ],
)
def test_max_tokens_0_requires_echo(http: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "?", **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


# Other models


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    with serving(lambda _, index: [7, 8, END][index], tokenizer=False) as server, client_of(server) as client:
        body: Any = {"max_tokens": 5, "logprobs": 1, "echo": True}
        (choice,) = complete(client, [5, 6], **body).choices
        assert (choice.text, choice.finish_reason) == ("", "stop")
        assert choice.logprobs.tokens == [f"token_id:{i}" for i in (5, 6, 7, 8, END)]
        assert choice.logprobs.text_offset == [0] * 5
        assert list(choice.logprobs.top_logprobs[1]) == ["token_id:6"]
        chunks = [chunk.choices[0] for chunk in complete(client, [5, 6], stream=True, **body)]
        logprobs = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
        assert logprobs == choice.logprobs.tokens


def test_special_tokens_have_names_and_no_bytes() -> None:
    """This tokenizer prepends a special token to prompts, and reads its name in a prompt as that token."""
    library = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    assert library.token_to_id("</s>") == END
    library.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", END)])
    tokenizer = Tokenizer(library)
    with (
        orca(simulated(lambda *_: END), config=CONFIG, model=MODEL, tokenizer=tokenizer) as service,
        serving_model(
            service, MODEL, CONFIG, tokenizer=tokenizer, chat_template="{{ messages[0].content }}"
        ) as server,
        client_of(server) as client,
    ):
        fields: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 1}
        (choice,) = complete(client, "a</s>é", logprobs=0, echo=True, **fields).choices
        assert choice.text == "a</s>é"
        assert choice.logprobs.tokens == ["</s>", "a", "</s>", r"bytes:\xc3", r"bytes:\xa9", "</s>"]
        assert choice.logprobs.text_offset == [0, 0, 1, 5, 5, 6]
        answer = client.chat.completions.create(model="test", messages=[USER], logprobs=True, **fields)
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        assert [(token.token, token.bytes) for token in answer.choices[0].logprobs.content] == [
            ("</s>", None)
        ]
