"""The chain of hashes of a prompt's beginning: prompts that extend it, and prompts that share nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.ray.routing.prefix_choice import MOST_STEPS, RoutingKey, covered_bytes
from server.ray.routing.prefix_key import routing_key

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"

MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=300)},
    optional={"name": st.text(max_size=5), "refusal": st.none()},
)
IDS = st.lists(st.integers(0, 50_000), max_size=300)


def chain(path: str, tenant: bytes = b"", **body: Any) -> tuple[int, ...]:
    return routing_key(path, tenant, json.dumps(body).encode()).prefix


@given(st.lists(MESSAGE, max_size=12), st.lists(MESSAGE, min_size=1, max_size=4))
def test_a_longer_conversation_extends_the_chain_of_a_shorter_one(
    messages: list[Any], more: list[Any]
) -> None:
    short, long = chain(CHAT, messages=messages), chain(CHAT, messages=messages + more)
    assert long[: len(short)] == short
    assert len(short) >= len(messages)  # so the previous turn's whole prompt is in it
    assert len(long) > len(short)


@given(st.text(max_size=2000), st.text(max_size=400))
def test_a_longer_text_extends_the_chain_of_a_shorter_one(text: str, more: str) -> None:
    short, long = chain(TEXT, prompt=text), chain(TEXT, prompt=text + more)
    assert long[: len(short)] == short
    assert len(short) == len(text.encode()) // 64 or len(short) > 64


@given(IDS, IDS)
def test_more_token_ids_extend_the_chain_in_steps_of_sixteen(ids: list[int], more: list[int]) -> None:
    short, long = chain(TEXT, prompt=ids), chain(TEXT, prompt=ids + more)
    assert long[: len(short)] == short
    if ids:
        assert len(short) == len(ids) // 16


@given(st.data())
def test_prompts_share_no_more_steps_than_they_have_in_common(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", min_size=64, max_size=1000))
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + ("b" if text[at] == "a" else "a") + text[at + 1 :]
    one, other = chain(TEXT, prompt=text), chain(TEXT, prompt=changed)
    assert one[: at // 64] == other[: at // 64]
    assert set(one[at // 64 :]).isdisjoint(other[at // 64 :])


def test_requests_that_share_no_cache_share_no_step() -> None:
    messages = [{"role": "user", "content": "word " * 200}]
    tool = {"type": "function", "function": {"name": "now"}}
    chains = [
        chain(CHAT, messages=messages),
        chain(CHAT, b"Bearer a", messages=messages),
        chain(CHAT, b"Bearer b", messages=messages),
        chain(CHAT, messages=messages, cache_salt="s"),
        chain(CHAT, messages=messages, model="demo"),
        chain(CHAT, messages=messages, tools=[tool]),
        chain(CHAT, messages=messages, chat_template="other"),
        chain(TEXT, prompt="word " * 200),
    ]
    steps = [step for steps in chains for step in steps]
    assert all(chains)
    assert len(set(steps)) == len(steps)


def test_equal_requests_have_equal_chains() -> None:
    text = "word " * 100
    assert chain(TEXT, prompt=text) == chain(TEXT, prompt=[text, "another"]) == chain(TEXT, prompt=[text])
    assert chain(TEXT, prompt=[1] * 64) == chain(TEXT, prompt=[[1] * 64, [2]])
    ordered = b'{"messages": [{"role": "user", "content": "hello", "name": null}], "max_tokens": 5}'
    other = b'{"max_tokens":9,"messages":[{"content":"hello","role":"user"}]}'
    assert routing_key(CHAT, b"", ordered) == routing_key(CHAT, b"", other) != RoutingKey()


def test_a_model_that_is_not_the_base_is_an_adapter() -> None:
    def adapter(model: Any, base: str | None = "base") -> int | None:
        body = json.dumps({"model": model, "prompt": "hello"}).encode()
        return routing_key(TEXT, b"a", body, base).adapter

    assert adapter("base") is adapter(None) is adapter(3) is adapter("sql", None) is None
    assert adapter("sql") == adapter("sql") not in (None, adapter("support"))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": null}', b'{"prompt": []}', b'{"prompt": 3}']
    + [b'{"prompt": [4294967296]}', b'{"prompt": [1.5]}', b'{"prompt": [{"a": 1}]}', b'{"prompt": ["", 3]}']
    + [b'{"messages": 1, "prompt": 1}', b'{"messages": ["a"]}', b'{"prompt": "\\ud800"}', b"[" * 100_000],
)
def test_a_request_that_cannot_be_read_has_no_chain(body: bytes) -> None:
    assert routing_key(TEXT, b"", body) == routing_key(CHAT, b"", body) == RoutingKey()


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_no_body_is_an_error(value: Any) -> None:
    for body in (value,) if isinstance(value, bytes) else (json.dumps({"messages": value, "prompt": value}),):
        data = body if isinstance(body, bytes) else body.encode()
        for path in (TEXT, CHAT, "/v1/models"):
            assert len(routing_key(path, b"", data).prefix) <= MOST_STEPS


def test_a_chain_is_bounded_and_covers_a_long_prompt() -> None:
    # 64 steps each of 64, 256, 1,024 and 4,096 bytes.
    assert covered_bytes(MOST_STEPS) == 64 * (64 + 256 + 1024 + 4096)
    assert covered_bytes(1) == 64
    assert covered_bytes(65) == 64 * 64 + 256
    whole = "a" * covered_bytes(MOST_STEPS)
    assert len(chain(TEXT, prompt=whole[:-1])) == MOST_STEPS - 1
    assert chain(TEXT, prompt=whole) == chain(TEXT, prompt=whole + "b" * 100_000)
    many = [{"role": "user", "content": str(i)} for i in range(2000)]
    assert len(chain(CHAT, messages=many)) == MOST_STEPS
