"""`return_token_ids`: the tokens of the prompt and of each output, where vLLM has them."""

import json
from typing import Any

import httpx2
import pytest

from tests.endpoint.harness import END, Server, serving
from tests.endpoint.http_client import connected
from tests.endpoint.tool_replies import CALL, SCHEMA, TEMPLATE, Replies

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
PROMPT = [*b"<user>Hi<assistant>"]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def post(server: Server, path: str, **fields: Any) -> httpx2.Response:
    with connected(server) as client:
        response = client.post(path, json={"return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[dict[str, Any]], index: int) -> list[int]:
    """All token ids of a choice, collected from its chunks, each of which has some."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in choices for token in choice.get("token_ids", ())]


def test_a_completion_has_token_ids() -> None:
    with serving(Replies("é!")) as server:
        whole = post(server, COMPLETIONS, prompt=[[97, 98], [5, 6]], n=2, max_tokens=20, seed=1).json()
        assert "prompt_token_ids" not in whole
        for choice, prompt in zip(whole["choices"], ([97, 98], [97, 98], [5, 6], [5, 6]), strict=True):
            assert choice["prompt_token_ids"] == prompt
            assert choice["token_ids"] == [0xC3, 0xA9, ord("!"), END]
            assert choice["text"] == "é!"
        chunks = chunks_of(
            post(server, COMPLETIONS, prompt=[[97, 98], [5, 6]], n=2, max_tokens=20, stream=True)
        )
        for index, prompt in enumerate(([97, 98], [97, 98], [5, 6], [5, 6])):
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [choice.get("prompt_token_ids") for choice in choices] == [
                prompt,
                *[None] * (len(choices) - 1),
            ]
            assert joined(chunks, index) == [0xC3, 0xA9, ord("!"), END]
            assert "".join(choice["text"] for choice in choices) == "é!"


def test_the_request_of_skyrl_s_tinker_server() -> None:
    """The fields that its client of an external engine sends, and those of the response that it reads."""
    fields = {
        "model": "test",
        "prompt": [97, 98],
        "n": 2,
        "seed": 7,
        "max_tokens": 20,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": True,
        "stream": False,
        "return_token_ids": True,
    }
    with serving(Replies("é!")) as server:
        choices = post(server, COMPLETIONS, **fields).json()["choices"]
        assert len(choices) == 2
        for choice in choices:
            assert choice["token_ids"] == [0xC3, 0xA9, ord("!"), END]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert len(logprobs) == len(choice["token_ids"]) and all(each <= 0 for each in logprobs)
            assert choice["finish_reason"] == "stop"
        without = post(server, COMPLETIONS, **fields | {"logprobs": False}).json()["choices"][0]
        assert without.get("logprobs") is None


def test_the_tokens_of_a_stop_string_are_there_and_those_of_an_echo_are_the_outputs() -> None:
    with serving(Replies("one two")) as server:
        choice = post(server, COMPLETIONS, prompt="ab", max_tokens=20, stop="two").json()["choices"][0]
        assert (choice["text"], bytes(choice["token_ids"])) == ("one ", b"one two")
        choice = post(server, COMPLETIONS, prompt="ab", max_tokens=3, echo=True).json()["choices"][0]
        assert (choice["text"], bytes(choice["token_ids"])) == ("abone", b"one")
        choice = post(server, COMPLETIONS, prompt="ab", max_tokens=0, echo=True).json()["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("ab", [], [97, 98])


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}])
def test_a_chat_has_token_ids(more: dict[str, Any]) -> None:
    with serving(Replies("é!")) as server:
        whole = post(server, CHAT, **HI, n=2, **more).json()
        assert whole["prompt_token_ids"] == PROMPT
        for choice in whole["choices"]:
            assert choice["token_ids"] == [0xC3, 0xA9, ord("!"), END]
            assert "prompt_token_ids" not in choice
        chunks = chunks_of(post(server, CHAT, **HI, n=2, stream=True, **more))
        for index in (0, 1):
            mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [chunk.get("prompt_token_ids") for chunk in mine] == [PROMPT, *[None] * (len(mine) - 1)]
            assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in mine)
            assert joined(chunks, index) == [0xC3, 0xA9, ord("!"), END]


def test_a_reply_with_reasoning_and_a_call() -> None:
    text = f"<think>Hm.</think>{CALL}"
    with serving(Replies(text), chat_template=TEMPLATE) as server:
        whole = post(server, CHAT, **HI, tools=TOOLS).json()
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert whole["choices"][0]["token_ids"] == [*text.encode(), END]
        chunks = chunks_of(post(server, CHAT, **HI, tools=TOOLS, stream=True))
        assert joined(chunks, 0) == [*text.encode(), END]
        assert [chunk for chunk in chunks if "prompt_token_ids" in chunk] == chunks[:1]
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_a_beam_search() -> None:
    with serving() as server:
        choices = post(
            server, COMPLETIONS, prompt="ab", n=2, use_beam_search=True, max_tokens=3, ignore_eos=True
        ).json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [3, 3]
    assert all(choice["prompt_token_ids"] == [97, 98] for choice in choices)


def test_without_a_tokenizer() -> None:
    with serving(lambda _, index: index, tokenizer=False) as server:
        fields: dict[str, Any] = {"prompt": [7], "max_tokens": 3, "ignore_eos": True}
        assert post(server, COMPLETIONS, **fields).json()["choices"][0]["token_ids"] == [0, 1, 2]
        assert joined(chunks_of(post(server, COMPLETIONS, **fields, stream=True)), 0) == [0, 1, 2]


def test_token_ids_come_only_on_request() -> None:
    with serving(Replies("a")) as server, connected(server) as client:
        for more in {}, {"return_token_ids": False}, {"return_token_ids": None}, {"stream": True}:
            assert "token_ids" not in client.post(CHAT, json={**HI, **more}).text
