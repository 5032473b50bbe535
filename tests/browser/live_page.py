"""Shared parts of the tests of /live: servers whose engine needs no device, and readers of the page."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, FilePayload, Page

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.scheduling.timeline import Timeline
from tests.browser.chromium import SOON, watched
from tests.endpoint.harness import Server, serving
from tests.endpoint.http_client import connected
from tests.host.engines import counting

# Prompts of more than 32 tokens come in chunks.
CHUNKED = ServingConfig(
    max_batch_size=4,
    n_slots=4096,
    max_batch_tokens=32,
    block_size=16,
    max_queue=512,
    scheduling=SchedulingConfig(),
)
BUCKETS = (1, 2, 4, 8, 16, 32)


def until(page: Page, what: str, condition: Callable[[], Any], seconds: float = SOON / 1000) -> None:
    """Wait until `condition` holds. The page's policy forbids playwright's own waits for an expression."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} seconds"
        page.wait_for_timeout(20)


def read(page: Page, name: str) -> Any:
    """Read `window.orcaLive`, the page's state for tests."""
    return page.evaluate(f"window.orcaLive.{name}()")


def connected_to(page: Page, path: str = "/live") -> Page:
    """Open the live page of a server, and wait until its feed has begun."""
    page.goto(path)
    page.locator("#phase", has_text="ready").wait_for()
    return page


def until_ended(page: Page, n: int, seconds: float = SOON / 1000) -> list[dict[str, Any]]:
    """Wait until `n` requests have ended on the page; return all of its requests."""

    def ended() -> bool:
        return sum(request["finished"] is not None for request in read(page, "requests")) >= n

    until(page, f"the end of {n} requests", ended, seconds)
    return read(page, "requests")


def complete(server: Server, prompt: str | list[str], n_tokens: int, **more: Any) -> None:
    """Ask the server for a completion."""
    with connected(server) as client:
        body = {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, **more}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text


def complete_all(server: Server, prompts: Sequence[tuple[str, int]], n_at_once: int = 8) -> None:
    """Ask for completions of these prompts and lengths, several at a time."""
    with ThreadPoolExecutor(n_at_once) as pool:
        for future in [pool.submit(complete, server, *prompt) for prompt in prompts]:
            future.result(SOON / 1000)


def mixed(n: int) -> list[tuple[str, int]]:
    """Prompts that differ from their first token on, of 1 to 70 tokens, with 1 to 12 tokens of output."""
    return [(chr(33 + i % 90) + "x" * (7 * i % 70), 1 + 5 * i % 12) for i in range(n)]


@contextmanager
def live_page(
    browser: Browser,
    *,
    config: ServingConfig = CHUNKED,
    seconds: float = 0.002,
    path: str = "/live",
    **more: Any,
) -> Iterator[tuple[Server, Page]]:
    """A server with these sizes, whose iterations take `seconds`, and its live page."""
    with serving(counting, seconds=seconds, config=config) as server:
        server.service.timeline.use_buckets(BUCKETS)
        with watched(browser, server.url, **more) as (page, _):
            yield server, connected_to(page, path)


def cells_of(timeline: Timeline) -> list[dict[str, Any]]:
    """The cells that the page should show for the timeline, if no request lost its slots."""
    begun: set[str] = set()
    iterations: list[dict[str, Any]] = []
    for record in timeline.iterations:
        cells: list[tuple[str, int, str]] = []
        for request_id, n_tokens, is_prompt in zip(
            record.request_ids, record.input_lengths, record.initiation, strict=True
        ):
            phase = "decode" if not is_prompt else "chunk" if request_id in begun else "prefill"
            begun.add(request_id)
            cells.append((request_id, n_tokens, phase))
        times = {"issued": record.issued, "returned": record.returned}
        iterations.append({"number": record.number, **times, "bucket": record.bucket, "cells": cells})
    return iterations


def shown_cells(page: Page) -> list[dict[str, Any]]:
    """The cells that the page shows."""
    ids = {request["number"]: request["id"] for request in read(page, "requests")}
    return [
        {
            **{name: one[name] for name in ("number", "issued", "returned", "bucket")},
            "cells": [(ids[cell["request"]], cell["tokens"], cell["phase"]) for cell in one["cells"]],
        }
        for one in read(page, "iterations")
    ]


def as_file(lines: Sequence[dict[str, Any]]) -> FilePayload:
    """A file to open, for playwright."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    return {"name": "saved.jsonl", "mimeType": "application/jsonl", "buffer": text.encode()}
