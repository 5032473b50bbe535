"""Lines of `orca serve` about conversations, and the first request that it shows."""

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx2

from orca_jax.config import SchedulingConfig
from server.commands.serving import chat_line, first_request
from server.gateway.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS
from tests.endpoint.harness import CONFIG, MODEL, serving

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def shown_body(command: str) -> tuple[str, dict[str, object]]:
    """The URL's path, and the body, of the command."""
    curl, url, *rest = shlex.split(command)
    assert curl == "curl" and rest[-2] == "-d"
    return url.split("8000", 1)[1], json.loads(rest[-1])


def test_a_model_that_can_chat() -> None:
    with serving(chat_template=TEMPLATE, name="it's") as server:
        command = first_request(server.model, "http://a:8000", keyed=False)
        assert chat_line(server.model, None) == "by the model's template; tool calls: text; reasoning: text"
        assert chat_line(server.model, Path("a.jinja")).startswith("by the template a.jinja;")
        path, body = shown_body(command)
        assert path == "/v1/chat/completions" and body["model"] == "it's" and "messages" in body
        formats = {"tool_format": TOOL_FORMATS["hermes"], "reasoning_format": REASONING_FORMATS["think"]}
        assert chat_line(replace(server.model, **formats), None).endswith("calls: hermes; reasoning: think")
        if shutil.which("curl"):
            here = command.replace("http://a:8000", server.url)
            done = subprocess.run(["sh", "-c", here], capture_output=True, text=True, timeout=60)
            assert json.loads(done.stdout)["object"] == "chat.completion"


def test_an_engine_that_cannot() -> None:
    with serving(chat_template=None) as server:
        path, body = shown_body(first_request(server.model, "http://a:8000", keyed=False))
        assert path == "/v1/completions" and isinstance(body["prompt"], str)
        assert chat_line(server.model, None).startswith("no chat template: /v1/completions alone;")
        without = replace(server.model, tokenizer=None)
        path, body = shown_body(first_request(without, "http://a:8000", keyed=False))
        assert path == "/v1/completions" and body["prompt"] == [1, 2, 3]


def test_a_model_that_only_makes_embeddings() -> None:
    """The command works, and for a ranker it is a ranking."""
    bidirectional = replace(MODEL, layers=tuple(layer.with_attention(causal=False) for layer in MODEL.layers))
    whole = replace(CONFIG, scheduling=SchedulingConfig(chunked_prefill=False, prefix_caching=False))
    with serving(model=bidirectional, config=whole) as server:
        path, body = shown_body(first_request(server.model, "http://a:8000", keyed=False))
        assert path == "/v1/embeddings" and httpx2.post(server.url + path, json=body).status_code == 200
        assert chat_line(server.model, None) == "off: the model makes embeddings"
        assert not server.model.can_chat
        ranker = replace(server.model, config=replace(bidirectional, ranker=True))
        path, body = shown_body(first_request(ranker, "http://a:8000", keyed=False))
        assert path == "/v1/rerank" and httpx2.post(server.url + path, json=body).status_code == 200
        assert chat_line(ranker, None) == "off: the model ranks texts"


def test_tls_and_keys_have_their_place() -> None:
    with serving() as server:
        command = first_request(server.model, "https://a:8000", keyed=True)
        assert "Authorization: Bearer YOUR_KEY" in command and "--insecure" in command
        plain = first_request(server.model, "http://a:8000", keyed=False)
        assert "Authorization" not in plain and "--insecure" not in plain
