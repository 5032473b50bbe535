"""Write the calls of a request's path into docs/structure.md, from a request that really runs.

    python -m scripts.request_path            write them
    python -m scripts.request_path --check    say whether the document has the same calls, in the same files

The demo model continues a prompt, once through `LLM.generate` and once through POST /v1/completions. The path
ends at the compiled program that samples. It has two legs, one on the caller's thread into the request pool
and one on the scheduler's; each is the stack at its last call.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from orca_jax import LLM, SamplingParams
from orca_jax.execution.programs import Program
from orca_jax.scheduling.request_pool import RequestPool
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.http.app import create_app
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- the calls, by scripts/request_path.py -->", "<!-- end of the calls -->"
ROUTE = "create_completion"


class Call(NamedTuple):
    """A function on the path, and where it is defined."""

    name: str
    file: str
    line: int


def stack(frame: FrameType | None) -> list[Call]:
    """The functions of the engine and the server on a stack, outermost first.

    A list comprehension is a function in Python 3.11, and not in 3.12.
    """
    calls: list[Call] = []
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and "<listcomp>" not in code.co_qualname:
            file = path.relative_to(ROOT)
            if file.parts[0] in ("orca_jax", "server"):
                calls.append(Call(code.co_qualname, file.as_posix(), code.co_firstlineno))
    return calls[::-1]


@contextmanager
def recorded(llm: LLM) -> Iterator[list[list[Call]]]:
    """Record the stack of the next request's entry into the pool, and that of its first token's sampling."""
    legs: list[list[Call]] = []
    sampler: Any = llm.service.scheduler.engine
    for name in ("_workers", "_chooser", "_choose"):
        sampler = getattr(sampler, name)

    def watched(owner: type, name: str, is_last: Callable[[object], bool]) -> None:
        method = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            last = Call(method.__qualname__, _file_of(method), method.__code__.co_firstlineno)
            if is_last(self) and all(leg[-1] != last for leg in legs):
                legs.append([*stack(sys._getframe(1)), last])
            return method(self, *args, **kwargs)

        setattr(owner, name, call)
        undo.append((owner, name, method))

    undo: list[tuple[type, str, Any]] = []
    watched(RequestPool, "add", lambda _: True)
    watched(Program, "__call__", lambda program: program is sampler)
    try:
        yield legs
    finally:
        for owner, name, method in undo:
            setattr(owner, name, method)


def _file_of(method: Any) -> str:
    return Path(method.__code__.co_filename).relative_to(ROOT).as_posix()


def of_generate(llm: LLM) -> list[Call]:
    """The path from `LLM.generate`."""
    with recorded(llm) as legs:
        llm.generate("Once upon a time", SamplingParams(max_tokens=2))
    return [call for leg in legs for call in leg]


def of_http(llm: LLM) -> list[Call]:
    """The path from the route of POST /v1/completions; what is around all routes is left out."""
    body = json.dumps({"model": "demo", "prompt": "Once upon a time", "max_tokens": 2}).encode()
    messages: list[dict[str, Any]] = []

    async def post() -> None:
        gateway = Gateway(request_timeout=None)
        app = create_app(
            gateway, EndpointOptions(port=0, grpc_port=None), api_keys=ApiKeys(), metrics=Metrics(gateway)
        )
        served = ServedModel(
            name="demo", service=llm.service, config=llm.config, serving=llm.serving, tokenizer=llm.tokenizer
        )
        gateway.open(served)
        received = iter([{"type": "http.request", "body": body}])
        leaves = asyncio.Event()

        async def receive() -> dict[str, Any]:
            message = next(received, None)
            if message is None:
                await leaves.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
            "state": {},
        }
        await app(scope, receive, send)

    with recorded(llm) as legs:
        asyncio.run(post())
    assert messages and messages[0].get("status") == 200, messages
    calls = [call for leg in legs for call in leg]
    return calls[next(i for i, call in enumerate(calls) if call.name == ROUTE) :]


def table(name: str, calls: Sequence[Call]) -> list[str]:
    """A list in Markdown, one call a line."""
    lines = [f"{name}, {len(calls)} calls:", ""]
    lines += [
        f"{i + 1}. `{call.name}`, [{call.file}](../{call.file}) line {call.line}"
        for i, call in enumerate(calls)
    ]
    return [*lines, ""]


def lists() -> str:
    """Both paths, as the document has them between its marks."""
    with LLM(max_batch_size=2) as llm:
        parts = [*table("From `LLM.generate` to the sampler", of_generate(llm))]
        parts += table("From `POST /v1/completions` to the sampler", of_http(llm))
    return "\n".join([BEGIN, "", *parts]) + END


def without_lines(text: str) -> str:
    """The text without line numbers, which change with every edit above a function."""
    return re.sub(r" line \d+", "", text)


def main() -> int:
    """Run both requests, and write or check the document."""
    parser = argparse.ArgumentParser(prog="python -m scripts.request_path", description="A request's calls")
    parser.add_argument("--check", action="store_true", help="only compare, without line numbers")
    check = parser.parse_args().check
    new, text = lists(), DOCUMENT.read_text("utf-8")
    old = text[text.index(BEGIN) : text.index(END) + len(END)]
    if not check:
        DOCUMENT.write_text(text.replace(old, new), "utf-8")
    elif without_lines(old) != without_lines(new):
        print(f"{DOCUMENT} has other calls; run python -m scripts.request_path. Now they are:\n{new}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
