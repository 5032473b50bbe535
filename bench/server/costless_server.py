"""Both endpoints on a simulated engine that uses no processor time, which leaves only the endpoints' work.

During an iteration the engine's thread sleeps: without that, tokens would come faster than they can be sent,
and many would be sent together.
"""

import asyncio
import cProfile
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Literal

import uvloop

from orca_jax.config import ServingConfig
from orca_jax.engine.engine_master import LOOK_SECONDS
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.shape import bucket_sizes
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.request import Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.engine_protocol import Iteration, Returned, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token
from server.commands.endpoints import Endpoints
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.metrics import Metrics
from server.process.watchdog import Watchdog, settle
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

MAX_STREAMS = 64
ITERATION_SECONDS = 0.01
HOST = "127.0.0.1"
_MOST_HOT = 25

Question = Literal["ports", "cpu", "threads", "holds", "profile", "hottest"]


@dataclass(frozen=True, slots=True)
class Direct:
    """The same load without an endpoint; the answer is its processor time in seconds."""

    prompts: Sequence[Sequence[int]]
    n_output: int


@dataclass(frozen=True, slots=True)
class Device:
    """The simulated device: the seconds of an iteration and the most rows in one; and what is before it."""

    seconds: float = ITERATION_SECONDS
    max_rows: int = MAX_STREAMS
    endpoint_processes: int = 0


@dataclass(frozen=True, slots=True)
class Hot:
    """A function on the event loop: its own seconds, and its seconds including calls."""

    name: str
    calls: int
    own: float
    whole: float


class PacedEngine(SimulatedEngine):
    """Tokens of the demo model's vocabulary, from a device that runs one iteration at a time in `seconds`.

    As a real device does, it begins an issued iteration as soon as it is free, whatever the host does then.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds_each = seconds
        self._done_at = deque[float]()  # of each iteration in flight
        self._device_free_at = 0.0
        vocab_size = PRESETS["demo"].vocab_size
        super().__init__(
            VirtualClock(), token=lambda req, index: 1 + hashed_token(req, index) % (vocab_size - 1)
        )

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self._device_free_at = max(time.monotonic(), self._device_free_at) + self._seconds_each
        self._done_at.append(self._device_free_at)
        return super().issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        while (left := self._done_at[0] - time.monotonic()) > 0:
            if interrupted is not never and interrupted():
                return None
            time.sleep(left if interrupted is never else min(left, LOOK_SECONDS))
        self._done_at.popleft()
        return super().wait(iteration, never)


def server(connection: Connection, device: Device = Device()) -> None:
    """Entry point of an OtherProcess. It answers

    - "ports": HTTP's and gRPC's;
    - "cpu": processor seconds since the start, "threads": those of each thread by its name;
    - a Direct;
    - "holds": the longest of the event loop and of the GIL since the last question, in seconds;
    - "profile": starts profiling the event loop, "hottest": a list of Hot, the costliest first.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection, device))


def served_model(device: Device) -> ServedModel:
    """The demo model's tokenizer, template and sizes, on the paced engine."""
    model = PRESETS["demo"]
    n_rows = device.max_rows
    serving = ServingConfig(max_batch_size=n_rows, n_slots=n_rows * model.n_positions, max_queue=4 * n_rows)
    kv = KVManager(
        n_blocks=serving.n_blocks,
        block_size=serving.block_size,
        n_rows=2 * n_rows,
        max_blocks_per_row=-(-model.n_positions // serving.block_size),
    )
    sizes = bucket_sizes(serving.max_batch_tokens)
    tokenizer = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json")
    template = load_chat_template(DEMO_MODEL, None)
    assert template is not None
    template.read_ahead()
    service = Orca(
        PacedEngine(device.seconds), kv, config=serving, model=model, tokenizer=tokenizer, bucket_sizes=sizes
    )
    return ServedModel(
        name="demo",
        service=service,
        config=model,
        serving=serving,
        tokenizer=tokenizer,
        chat_template=template,
    )


async def _serve(connection: Connection, device: Device) -> None:
    model = served_model(device)
    gateway = Gateway(request_timeout=600.0)
    metrics = Metrics(gateway)
    watchdog = Watchdog(asyncio.get_running_loop())
    options = EndpointOptions(
        host=HOST,
        port=0,
        grpc_port=0,
        access_log="off",
        max_connections=4096,
        max_connections_per_address=4096,
        endpoint_processes=device.endpoint_processes,
    )
    endpoints = Endpoints(gateway, options, api_keys=ApiKeys.read(None, {}), metrics=metrics)
    profile = cProfile.Profile()
    with model.orca as service:
        await endpoints.start()
        metrics.attach(model)
        await endpoints.open(model)
        settle()  # as in `orca serve`; otherwise a full garbage collection falls into one of the measurements
        watchdog.start()
        try:
            while True:
                question: Question | Direct = await asyncio.to_thread(connection.recv)
                answer: object = None
                if isinstance(question, Direct):
                    service.on_delivered = None  # as without an endpoint
                    answer = await asyncio.to_thread(_direct, model, question)
                    gateway.open(model)
                elif question == "ports":
                    answer = (endpoints.http_port, endpoints.grpc_port)
                elif question == "cpu":
                    answer = time.process_time()
                elif question == "threads":
                    answer = _thread_seconds(endpoints.process_ids)
                elif question == "holds":
                    answer = watchdog.take_longest()
                elif question == "profile":
                    profile.enable()
                else:
                    profile.disable()
                    answer = _hottest(profile)
                connection.send(answer)
        except EOFError:
            pass
        finally:
            watchdog.stop()
            await endpoints.stop()


def _thread_seconds(others: Sequence[int]) -> dict[str, float]:
    seconds = defaultdict[str, float](float)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        name = re.sub(r"[-_ ]*\d.*", "", names.get(int(task.name), "of libraries"))
        seconds[name] += nanoseconds / 1e9
    for process in others:
        for task in Path(f"/proc/{process}/task").iterdir():
            seconds["endpoint processes"] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return dict(seconds)


def _direct(model: ServedModel, load: Direct) -> float:
    params = SamplingParams(max_tokens=load.n_output, temperature=0.0, ignore_eos=True)
    cpu = time.process_time()
    generations = [model.orca.submit(prompt, params) for prompt in load.prompts]
    for generation in generations:
        generation.result(timeout=240.0)
    return time.process_time() - cpu


def _hottest(profile: cProfile.Profile) -> list[Hot]:
    functions = [
        Hot(_place(entry.code), entry.callcount, entry.inlinetime, entry.totaltime)
        for entry in profile.getstats()
    ]
    return sorted(functions, key=lambda hot: -hot.own)[:_MOST_HOT]


def _place(code: CodeType | str) -> str:
    if isinstance(code, str):  # not Python code
        return code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_name}"
