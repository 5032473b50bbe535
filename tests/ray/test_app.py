"""Two engines of the demo model behind one address, as OpenAI's client sees them."""

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from orca_jax import LLM, SamplingParams
from tests.ray.conftest import SMALL, SOON, Serve, Served
from tests.ray.readings import metrics, n_generated, n_live, until

BODY_SECONDS = 2.0
LEFT_SECONDS = 5.0  # until the requests of a client that has left are gone
PROMPTS = [f"{'In the beginning ' * (i % 5)}{chr(97 + i % 26)}" for i in range(64)]


@pytest.fixture(scope="module")
def served(run_app: Serve) -> Served:
    return run_app(num_replicas=2, body_timeout=BODY_SECONDS, max_body_bytes=1 << 20)


def stream(client: openai.OpenAI, prompt: str, max_tokens: int) -> tuple[str, str | None]:
    """The text and the finish reason."""
    text, reason = "", None
    for chunk in client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    """Outputs of one engine in this process for the prompts."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    sizes = {name: SMALL[name] for name in ("max_batch_size", "n_slots", "max_batch_tokens")}
    with LLM(**sizes, compile_ahead=False) as llm:
        yield [result.text for result in llm.generate(PROMPTS, params)]


def test_64_streams_have_the_texts_of_one_engine(served: Served, expected: list[str]) -> None:
    before = n_generated(served)
    with served.client() as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        results = list(pool.map(lambda prompt: stream(client, prompt, 24), PROMPTS))
    assert results == [(text, "length") for text in expected]
    assert n_generated(served) - before == 24 * len(PROMPTS)


def test_a_stream_is_not_buffered(served: Served) -> None:
    n_tokens = 500
    before = n_generated(served)
    with served.client() as client:
        chunks = client.completions.create(
            model="demo", prompt="a", max_tokens=n_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(chunks).choices[0].text
        # The client has the first chunk, and only now the engine is asked how far it is.
        assert 1 <= n_generated(served) - before < n_tokens
        assert sum(len(chunk.choices) for chunk in chunks) > 100
    assert n_generated(served) - before == n_tokens


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_place(served: Served, streamed: bool) -> None:
    before = n_generated(served)
    fields = {"prompt": "a", "max_tokens": 500, "n": 8, "ignore_eos": True, "stream": streamed}
    body = json.dumps(fields).encode()
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=SOON) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        until(lambda: n_live(served) == 8)
    began = time.monotonic()
    n_live(served)
    scrape = time.monotonic() - began  # it takes as long to find out
    assert until(lambda: n_live(served) == 0) < LEFT_SECONDS + 2 * scrape
    assert sum(metrics(served)["orca_engine_load"].values()) == 0
    assert n_generated(served) - before < 8 * 500  # it did not run to its end


def test_errors_keep_their_form(served: Served) -> None:
    with served.client() as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="demo", prompt="a", max_tokens=-1)
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            client.completions.create(model="other", prompt="a")
    missing = served.get("/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "unknown_url"


def test_a_body_that_is_too_large_or_never_ends_is_refused(served: Served) -> None:
    large = httpx2.post(served.url + "/v1/completions", content=b"x" * ((1 << 20) + 1), timeout=SOON)
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=SOON) as connection:
        began = time.monotonic()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = connection.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408 "), answer
        assert BODY_SECONDS * 0.9 < time.monotonic() - began < SOON / 2


def test_headers_are_set_once_and_the_id_passes_both_hops(served: Served) -> None:
    fields = {"prompt": "a", "max_tokens": 2}
    for streamed in (False, True):
        answer = httpx2.post(
            served.url + "/v1/completions",
            json=fields | {"stream": streamed},
            headers={"X-Request-Id": "mine-1"},
            timeout=SOON,
        )
        names = [name.lower() for name, _ in answer.headers.multi_items()]
        assert len(names) == len(set(names)), names
        assert answer.headers["x-request-id"] == "mine-1"
        assert ("content-length" in names) != ("transfer-encoding" in names)
    failed = httpx2.get(served.url + "/nothing", timeout=SOON)
    assert re.fullmatch(r"[0-9a-f-]{32,36}", failed.headers["x-request-id"])


def test_large_responses_are_whole(served: Served) -> None:
    fields = {"prompt": "a", "max_tokens": 300, "logprobs": 20, "n": 2, "ignore_eos": True, "temperature": 0}
    whole = httpx2.post(served.url + "/v1/completions", json=fields, timeout=SOON)
    assert len(whole.content) > 4 * 65536
    first, second = [choice["logprobs"]["tokens"] for choice in whole.json()["choices"]]
    assert len(first) == 300 and first == second


def test_health_ready_and_metrics_are_about_all_engines(served: Served) -> None:
    assert served.get("/health").json() == {"status": "ok"}
    assert httpx2.head(served.url + "/health", timeout=SOON).status_code == 200
    ready = served.get("/ready")
    assert ready.status_code == 200 and ready.json()["status"] == "ready"
    assert list(ready.json()["engines"].values()) == ["ready", "ready"]
    values = metrics(served)
    assert set(values["orca_engine_load"]) == set(ready.json()["engines"])
    assert list(values["orca_door_engines"].values()) == [2.0]
    assert len(values["process_resident_memory_bytes"]) == 3


def test_each_api_key_is_a_tenant_of_its_own(run_app: Serve, tmp_path: Path) -> None:
    """An ingress reads no body without a key, and passes on each key's requests. Replaces the application."""
    keys = tmp_path / "keys"
    keys.write_text("first-tenant-key\nsecond-tenant-key\n")
    keys.chmod(0o600)
    served = run_app(api_key_file=str(keys))
    prompt = "In the beginning " * 8
    for key in ("first-tenant-key", "second-tenant-key"):
        with served.client(api_key=key) as client:
            cached: list[int] = []
            for _ in range(2):
                usage = client.completions.create(model="demo", prompt=prompt, max_tokens=2).usage
                assert usage is not None and usage.prompt_tokens_details is not None
                cached.append(usage.prompt_tokens_details.cached_tokens or 0)
            assert cached[0] == 0 < cached[1], "a key finds its own prompt in the cache, and no other's"
    with served.client(api_key="a-wrong-key") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model="demo", prompt="a" * 500_000, max_tokens=2)
