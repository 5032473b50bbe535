"""Log-probabilities over HTTP against the reference model: prompt and output, streamed and not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.model import reference
from orca_jax.model_files.found_model import DEMO_MODEL
from tests.endpoint.harness import serving_model
from tests.endpoint.http_client import connected

PROMPT = "König David sah 日本 🦜 and said"  # characters of one to four bytes, most of several tokens
N_TOP = 4


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_batch_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[httpx2.Client]:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        serving_model(
            llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer, chat_template=template
        ) as server,
        connected(server) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def exact(llm: LLM, client: httpx2.Client) -> np.ndarray:
    """The reference's [tokens - 1, V] of the prompt and the output that `body` asks for, in float64."""
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    (result,) = llm.generate(ids, params_of(body()))
    checkpoint = load_checkpoint(DEMO_MODEL, dtype=jnp.float32)
    tokens = jnp.array([*ids, *result.token_ids])
    logits = np.asarray(reference.forward(checkpoint.config, checkpoint.parameters, tokens), np.float64)
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))[:-1]


def body(**fields: Any) -> dict[str, Any]:
    given_fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    return given_fields | {"logprobs": N_TOP} | fields


def params_of(fields: dict[str, Any]) -> Any:
    from_json = {name: value for name, value in fields.items() if name != "prompt"}
    return SamplingParams(**from_json)


def ids_of(llm: LLM, client: httpx2.Client) -> list[int]:
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    (result,) = llm.generate(ids, params_of(body()))
    return [*ids, *result.token_ids]


def streamed(client: httpx2.Client, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choice of each chunk."""
    with client.stream("POST", path, json={**fields, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_completions_with_echo(llm: LLM, client: httpx2.Client, exact: np.ndarray) -> None:
    ids = ids_of(llm, client)
    choice = client.post("/v1/completions", json=body(echo=True)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) == len(exact) + 1
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    np.testing.assert_allclose(
        logprobs["token_logprobs"][1:], exact[np.arange(len(exact)), ids[1:]], atol=1e-4
    )
    for top, row in zip(logprobs["top_logprobs"][1:], exact, strict=True):
        likeliest = sorted(top.values(), reverse=True)[:N_TOP]
        np.testing.assert_allclose(likeliest, np.sort(row)[::-1][:N_TOP], atol=1e-4)
    assert choice["text"].startswith(PROMPT)

    # Offsets by brute force: what the bytes before a token make, in whole characters.
    assert llm.tokenizer is not None
    data = [llm.tokenizer.token_bytes(i) for i in ids]
    for i, offset in enumerate(logprobs["text_offset"]):
        whole = b"".join(data[:i]).decode("utf-8", "ignore")
        assert offset == len(whole), i
    assert len(set(logprobs["text_offset"])) < len(ids), "some characters have several tokens"

    chunks = streamed(client, "/v1/completions", body(echo=True))
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"][name]]
        assert parts == logprobs[name], name


def test_a_chats_log_probabilities_are_the_references(
    llm: LLM, client: httpx2.Client, exact: np.ndarray
) -> None:
    ids = ids_of(llm, client)
    n_output = 24
    fields = {key: value for key, value in body().items() if key not in ("prompt", "logprobs")}
    fields |= {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": N_TOP}
    choice = client.post("/v1/chat/completions", json=fields).json()["choices"][0]
    logprobs = choice["logprobs"]["content"]
    assert len(logprobs) == n_output
    rows = exact[-n_output:]
    for one, row, token_id in zip(logprobs, rows, ids[-n_output:], strict=True):
        np.testing.assert_allclose(one["logprob"], row[token_id], atol=1e-4)
        likeliest = [top["logprob"] for top in one["top_logprobs"]]
        np.testing.assert_allclose(likeliest, np.sort(row)[::-1][:N_TOP], atol=1e-4)
    text = b"".join(bytes(one["bytes"] or []) for one in logprobs).decode("utf-8", "replace")
    assert text == choice["message"]["content"]
    chunks = streamed(client, "/v1/chat/completions", fields)
    parts = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert parts == logprobs
