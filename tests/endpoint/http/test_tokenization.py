"""`/tokenize` and `/detokenize`, with a tokenizer whose tokens are bytes."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import Tokenizer
from tests.endpoint.harness import serving
from tests.endpoint.http_client import connected
from tests.host.engines import LETTERS


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with serving() as server, connected(server) as client:
        yield client


def test_a_text_is_tokenized(client: httpx2.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "na\u00efve", "model": "test"}).json()
    assert answer == {"tokens": [0x6E, 0x61, 0xC3, 0xAF, 0x76, 0x65], "count": 6, "max_model_len": 512}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_conversation_is_tokenized_with_its_template(client: httpx2.Client) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]},
    ]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert bytes(answer["tokens"]) == b"<user>Hi<assistant>Yes<assistant>"
    assert answer["count"] == 33


def test_token_ids_are_detokenized(client: httpx2.Client) -> None:
    # 256 is end of sequence and 299 has no token: neither has text. An invalid UTF-8 byte becomes U+FFFD.
    answer = client.post("/detokenize", json={"tokens": [0x61, 0xC3, 0xAF, 256, 299, 0xFF]}).json()
    assert answer == {"prompt": "a\u00ef\ufffd"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=120))
def test_a_round_trip_keeps_the_text(client: httpx2.Client, text: str) -> None:
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert bytes(tokens) == text.encode()
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def with_a_beginning() -> Tokenizer:
    """The byte tokenizer, which prepends token 256 to every text, as OPT's tokenizer prepends one."""
    vocabulary = {**BYTE_OF_CHARACTER, "<begin>": 256}
    library = tokenizers.Tokenizer(BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<begin>"])
    library.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 256)]
    )
    return Tokenizer(library)


@pytest.mark.parametrize(
    "body, tokens",
    [
        ({"prompt": "a"}, [256, 97]),
        ({"prompt": "a", "add_special_tokens": True}, [256, 97]),
        ({"prompt": "a", "add_special_tokens": False}, [97]),
        ({"messages": [{"role": "user", "content": "a"}]}, [97]),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, [256, 97]),
    ],
)
def test_special_tokens_are_added_as_requested(body: dict[str, Any], tokens: Sequence[int]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(ready=False, chat_template=template) as server, connected(server) as client:
        model = replace(server.model, tokenizer=with_a_beginning())
        server.call(lambda: server.gateway.open(model))
        assert client.post("/tokenize", json=body).json()["tokens"] == tokens
        assert client.post("/detokenize", json={"tokens": [256, 97]}).json() == {"prompt": "a"}


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        ("/tokenize", {}, "prompt", "neither prompt nor messages is given; give one of them"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "messages",
            "prompt and messages are both given; give one of them",
        ),
        ("/tokenize", {"prompt": "a" * 513}, "prompt", "prompt has 513 characters"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 513}]}, "messages", "messages has"),
        (
            "/tokenize",
            {"messages": [{"role": "function", "content": "a"}]},
            "messages.0.role",
            "messages.0.role is not built yet",
        ),
        ("/detokenize", {"tokens": [0, 300]}, "tokens.1", "tokens.1 is 300; it must be from 0 to 299"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "tokens.0 is -1; it must be from 0 to 299"),
        ("/detokenize", {"tokens": [10**30]}, "tokens.0", "tokens.0 is 10000"),
    ],
)
def test_wrong_requests_are_refused_by_field(
    client: httpx2.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize("path, body", [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_models_name_is_not_found(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json={**body, "model": "other"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_a_model_without_a_tokenizer() -> None:
    with serving(tokenizer=False, chat_template=None) as server, connected(server) as client:
        for path, body, param in (
            ("/tokenize", {"prompt": "a"}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
            ("/detokenize", {"tokens": [1]}, "tokens"),
        ):
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class Watched(Tokenizer):
    """A tokenizer that records the thread on which it encodes."""

    def __init__(self) -> None:
        super().__init__(LETTERS._tokenizer)
        self.threads: list[threading.Thread] = []
        self.max_token_length = 1000  # so that a long text is not rejected unread

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_long_text_is_encoded_off_the_event_loop() -> None:
    tokenizer = Watched()
    with serving(ready=False) as server, connected(server) as client:
        server.call(lambda: server.gateway.open(replace(server.model, tokenizer=tokenizer)))
        for n in (10, 100_000):
            answer = client.post("/tokenize", json={"prompt": "x" * n}).json()
            assert answer["count"] == n
    short, long = tokenizer.threads
    assert short.name == "endpoints"
    assert long.name != "endpoints"
