"""Both endpoints on a simulated engine that uses no processor time, which leaves only the endpoints' work.

During an iteration the engine's thread sleeps: without that, tokens would come faster than they can be sent,
and many would be sent together.
"""

import asyncio
import cProfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Literal

import uvloop

import orca_jax
from orca_jax.config import ServingConfig
from orca_jax.families.presets import PRESETS
from orca_jax.iteration.shape import bucket_sizes
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token
from server.commands.endpoints import Endpoints
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.metrics import Metrics
from server.process.watchdog import settle
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

MAX_STREAMS = 64
ITERATION_SECONDS = 0.01
HOST = "127.0.0.1"

Question = Literal["ports", "cpu", "profile", "hottest"]


@dataclass(frozen=True, slots=True)
class Direct:
    """The same load without an endpoint; the answer is its processor time in seconds."""

    prompts: Sequence[Sequence[int]]
    n_output: int


@dataclass(frozen=True, slots=True)
class Hot:
    """A function on the event loop: its own seconds, and its seconds including calls."""

    name: str
    calls: int
    own: float
    whole: float


class PacedEngine(SimulatedEngine):
    """Tokens of the demo model's vocabulary, one iteration per 10 ms."""

    def __init__(self) -> None:
        vocab_size = PRESETS["demo"].vocab_size
        super().__init__(
            VirtualClock(), token=lambda req, index: 1 + hashed_token(req, index) % (vocab_size - 1)
        )

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        time.sleep(ITERATION_SECONDS)
        return super().wait(iteration, interrupted)


def server(connection: Connection) -> None:
    """For an OtherProcess: answers "ports" (HTTP's, gRPC's), "cpu" (seconds so far), a Direct, "profile"
    (starts profiling the event loop), "hottest" (a list of Hot, the ten costliest first).
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection))


def served_model() -> ServedModel:
    """The demo model's tokenizer and sizes, on the paced engine."""
    model = PRESETS["demo"]
    serving = ServingConfig(max_batch_size=MAX_STREAMS, n_slots=MAX_STREAMS * model.n_positions)
    kv = KVManager(
        n_blocks=serving.n_blocks,
        block_size=serving.block_size,
        n_rows=2 * MAX_STREAMS,
        max_blocks_per_row=-(-model.n_positions // serving.block_size),
    )
    sizes = bucket_sizes(serving.max_batch_tokens)
    tokenizer = Tokenizer.from_file(Path(orca_jax.__file__).parent / "demo_model" / "tokenizer.json")
    service = Orca(PacedEngine(), kv, config=serving, model=model, tokenizer=tokenizer, bucket_sizes=sizes)
    return ServedModel(name="demo", service=service, config=model, serving=serving, tokenizer=tokenizer)


async def _serve(connection: Connection) -> None:
    model = served_model()
    gateway = Gateway(request_timeout=600.0)
    metrics = Metrics(gateway)
    options = EndpointOptions(host=HOST, port=0, grpc_port=0, access_log="off")
    endpoints = Endpoints(gateway, options, api_keys=ApiKeys.read(None, {}), metrics=metrics)
    profile = cProfile.Profile()
    with model.service as service:
        await endpoints.start()
        metrics.attach(model)
        gateway.open(model)
        settle()  # as in `orca serve`; otherwise a full garbage collection falls into one of the measurements
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
                elif question == "profile":
                    profile.enable()
                else:
                    profile.disable()
                    answer = _hottest(profile)
                connection.send(answer)
        except EOFError:
            pass
        finally:
            await endpoints.stop()


def _direct(model: ServedModel, load: Direct) -> float:
    params = SamplingParams(max_tokens=load.n_output, temperature=0.0, ignore_eos=True)
    cpu = time.process_time()
    generations = [model.service.submit(prompt, params) for prompt in load.prompts]
    for generation in generations:
        generation.result(timeout=240.0)
    return time.process_time() - cpu


def _hottest(profile: cProfile.Profile) -> list[Hot]:
    functions = [
        Hot(_place(entry.code), entry.callcount, entry.inlinetime, entry.totaltime)
        for entry in profile.getstats()
    ]
    return sorted(functions, key=lambda hot: -hot.own)[:10]


def _place(code: CodeType | str) -> str:
    if isinstance(code, str):  # not Python code
        return code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_name}"
