"""Runs both endpoints on loopback ports, over a service whose engine needs no device.

    with serving(writing("In the beginning")) as server:
        requests.post(server.url + "/v1/completions", ...)
        grpc.insecure_channel(server.grpc_address)

The endpoints run on an event loop in their own thread; `server.call` runs a function on it. The model's
tokens are bytes (`LETTERS`), and 256 is end of sequence; tokens that a request forbids are not generated.
`at_rest` says whether all resources have been released; leaving the context waits for that, and fails the
test if it does not happen.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orca_jax.config import ServingConfig
from orca_jax.engine_memory import EngineMemory
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.chat.chat_template import ChatTemplate
from orca_jax.request.request import Request
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.scheduling.timeline import TimelineObserver
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.orca import Orca
from server.commands.endpoints import Endpoints
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.table import AUTO, reply_formats
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from server.tracing.tracing import Tracing
from server.web.feed import LiveFeed, LiveView
from server.web.watch import Watch
from tests.endpoint.obedient import obedient
from tests.gpt_config import gpt_config
from tests.host.engines import LETTERS, SOON, PacedEngine, at_rest, counting, orca, simulated

T = TypeVar("T")

ENDPOINT_THREAD = "endpoints"

END = 256
MODEL = gpt_config(
    vocab_size=300, n_positions=512, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8, eos_token_ids=(END,)
)
CONFIG = ServingConfig(max_batch_size=8, n_slots=8192, max_batch_tokens=512, block_size=16, max_queue=256)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its addresses and its parts."""

    url: str
    grpc_address: str
    gateway: Gateway
    endpoints: Endpoints
    service: Orca
    model: ServedModel
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the endpoints' event loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SOON)

    @property
    def watchers(self) -> list[TimelineObserver]:
        """The observers of single requests: live views and traces."""
        return [one for one in self.service.timeline.observers if isinstance(one, Watch | Tracing)]

    def at_rest(self) -> bool:
        """Whether no request is live in the pool or the gateway and all slots are free."""
        return at_rest(self.service) and self.gateway.n_live == 0


@dataclass(frozen=True, slots=True)
class Compiles:
    """Compile counts of an engine without a device."""

    programs: int = 0
    from_disk: int = 0
    seconds: float = 0.0


def until(condition: Callable[[], bool], what: str, seconds: float = SOON) -> None:
    """Wait for `condition`; fail the test, naming `what`, if it is not true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} seconds"
        time.sleep(0.005)


async def until_here(condition: Callable[[], bool]) -> None:
    """`until` for use on the event loop itself, whose work the condition waits for."""
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.002)


@contextmanager
def serving(
    token: Callable[[Request, int], int] = counting,
    *,
    name: str = "test",
    engine: Engine | None = None,
    seconds: float = 0.0,
    config: ServingConfig = CONFIG,
    model: ModelConfig = MODEL,
    options: EndpointOptions | None = None,
    keys: ApiKeys | None = None,
    memory: EngineMemory | None = None,
    admin_keys: ApiKeys | None = None,
    tokenizer: bool = True,
    chat_template: str | None = TEMPLATE,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
    ready: bool = True,
    recording: Path | None = None,
    tracing: Tracing | None = None,
) -> Iterator[Server]:
    """A server whose engine generates `token(request, index)` every `seconds`, or one on `engine`.

    With `ready` False the gateway stays closed until
    `server.call(lambda: server.gateway.open(server.model))`. With `memory` an operator with one of
    `admin_keys` may change it.
    """
    if engine is None:
        token = obedient(token, model.vocab_size)
        engine = PacedEngine(token, seconds=seconds) if seconds else simulated(token)
    service = orca(engine, config=config, model=model, tokenizer=LETTERS if tokenizer else None)
    with (
        service,
        serving_model(
            service,
            model,
            config,
            name=name,
            tokenizer=LETTERS if tokenizer else None,
            chat_template=chat_template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            options=options,
            keys=keys,
            controls=None if memory is None else EngineControls(service, memory),
            admin_keys=admin_keys,
            ready=ready,
            recording=recording,
            tracing=tracing,
        ) as server,
    ):
        yield server


@contextmanager
def serving_model(
    service: Orca,
    model: ModelConfig,
    config: ServingConfig,
    *,
    name: str = "test",
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = None,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
    options: EndpointOptions | None = None,
    keys: ApiKeys | None = None,
    controls: EngineControls | None = None,
    admin_keys: ApiKeys | None = None,
    ready: bool = True,
    recording: Path | None = None,
    tracing: Tracing | None = None,
) -> Iterator[Server]:
    """Serve a service that is already running."""
    templates = None if chat_template is None else ChatTemplate(chat_template)
    formats = reply_formats(templates, tool_format, reasoning_format)
    served = ServedModel(
        name=name,
        service=service,
        config=model,
        serving=config,
        tokenizer=tokenizer,
        chat_template=templates,
        tool_format=formats.tools,
        reasoning_format=formats.reasoning,
        controls=controls,
        shows_versions=controls is not None,
        compiles=Compiles,
    )
    endpoint = options or EndpointOptions(port=0, grpc_port=0, access_log="off")
    assert endpoint.port == 0 and endpoint.grpc_port in (0, None), "tests take free ports"
    is_shared = keys is not None and keys.n_keys > 1
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=ENDPOINT_THREAD)
    thread.start()

    def on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(SOON)

    async def start() -> tuple[Gateway, Endpoints]:
        gateway = Gateway(request_timeout=endpoint.request_timeout)
        metrics = Metrics(gateway)
        endpoints = Endpoints(
            gateway,
            endpoint,
            api_keys=keys or ApiKeys.read(None, {}),
            admin_keys=admin_keys,
            metrics=metrics,
            live_view=LiveView(LiveFeed(gateway, shows_ids=not is_shared), recording, is_shared),
            tracing=tracing,
        )
        await endpoints.start()
        metrics.attach(served)
        if tracing is not None:
            tracing.start(served)
        if ready:
            await endpoints.open(served)
        return gateway, endpoints

    try:
        gateway, endpoints = on_loop(start())
        server = Server(
            endpoints.http_url, endpoints.grpc_address or "", gateway, endpoints, service, served, loop
        )
        try:
            yield server
            if service.failure is None:
                until(server.at_rest, "rest")
        finally:
            on_loop(endpoints.stop())
        left = on_loop(_other_tasks())
        assert not left, f"tasks left on the loop: {left}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SOON)
        loop.close()


async def _other_tasks() -> list[str]:
    """The other tasks still on the event loop, after a moment for finished ones to disappear."""
    mine = asyncio.current_task()
    deadline = time.monotonic() + 2
    while True:
        left = [task for task in asyncio.all_tasks() if task is not mine and not task.done()]
        if not left or time.monotonic() > deadline:
            return [repr(task) for task in left]
        await asyncio.sleep(0.01)
