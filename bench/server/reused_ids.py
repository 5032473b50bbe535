"""Reuses request ids from 32 threads: no call may fail, and no token may be duplicated or lost.

    python -m bench.server.reused_ids [--calls 1000000] [--processes 2] [--seed 0] [--direct]

The service runs on the simulated engine, whose tokens are a function of the request, behind gRPC in a
separate process. The callers draw ids from a small set, and read their streams to the end, cancel them,
disconnect, let them run into deadlines, or end them with Cancel. With `--direct` they call the service
itself, without gRPC, which is many times faster. Exits with 1 unless every accepted call had the right
tokens, the service never failed, and all slots are free again.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.other_process import OtherProcess
from bench.server.reused_id_calls import (
    N_THREADS,
    SWITCH_SECONDS,
    VOCAB_SIZE,
    Outcomes,
    Share,
    callers,
    engine_token,
    on_service,
)
from orca_jax.config import ServingConfig
from orca_jax.families.trainers.orca_json import GPTOptions
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from server.commands.endpoints import Endpoints
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions

CHUNK = 2_000  # calls of a process between two checks
REST_SECONDS = 30.0
N_WORKERS = 2  # the next iteration is issued while the previous one is in flight

MODEL = GPTOptions(
    vocab_size=VOCAB_SIZE, n_positions=512, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8
).model()
SERVING = ServingConfig(max_batch_size=16, n_slots=2048, max_batch_tokens=256, block_size=16, max_queue=256)


def simulated_service() -> Orca:
    """A service whose tokens are a function of the request, not started."""
    kv = KVManager(
        n_blocks=SERVING.n_blocks,
        block_size=SERVING.block_size,
        n_rows=(N_WORKERS + 1) * SERVING.max_batch_size,
        max_blocks_per_row=-(-MODEL.n_positions // SERVING.block_size),
    )
    engine = SimulatedEngine(VirtualClock(), token=engine_token, n_workers=N_WORKERS)
    return Orca(engine, kv, config=SERVING, model=MODEL)


def left(service: Orca) -> str:
    """Resources that ended requests still hold, or the reason why the service failed; empty if neither."""
    if service.failure is not None:
        return f"the service failed: {service.failure!r}"
    kv = service.scheduler.kv
    held = {
        "requests in the pool": len(service.pool),
        "reserved slots": service.scheduler.n_rsrv,
        "blocks": kv.n_blocks - kv.n_free_blocks,
        "rows": kv.n_rows - kv.n_free_rows,
    }
    return ", ".join(f"{n} {what}" for what, n in held.items() if n)


def left_at_rest(look: Callable[[], str]) -> str:
    """The report of `look` once everything in flight has ended, or after a while."""
    deadline = time.monotonic() + REST_SECONDS
    while (remaining := look()) and "failed" not in remaining and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def server(connection: Connection) -> None:
    """For an OtherProcess: answers "address" (gRPC's) and "left", which adds the gateway's live requests."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(connection))


async def _serve(connection: Connection) -> None:
    gateway = Gateway(request_timeout=600.0)
    metrics = Metrics(gateway)
    options = EndpointOptions(port=0, grpc_port=0, access_log="off")
    endpoints = Endpoints(gateway, options, api_keys=ApiKeys.read(None, {}), metrics=metrics)
    with simulated_service() as service:
        model = ServedModel(name="simulated", service=service, config=MODEL, serving=SERVING)
        await endpoints.start()
        metrics.attach(model)
        gateway.open(model)
        try:
            while True:
                question = await asyncio.to_thread(connection.recv)
                if question == "address":
                    connection.send(endpoints.grpc_address)
                else:
                    live = f"{gateway.n_live} live requests in the gateway" if gateway.n_live else ""
                    connection.send(live or left(service))
        except EOFError:
            pass
        finally:
            await endpoints.stop()


def over_grpc(n_calls: int, n_processes: int, seed: int, progress: Progress) -> tuple[Outcomes, str]:
    """Make the calls over gRPC; returns the outcomes, and what the server still holds."""
    outcomes = Outcomes()
    task = progress.add_task("calls over gRPC", total=n_calls)
    others = [OtherProcess(callers) for _ in range(n_processes)]
    with OtherProcess(server) as serving, ThreadPoolExecutor(n_processes) as pool:
        try:
            address = serving.ask("address")
            n_threads = max(1, N_THREADS // n_processes)
            n_done = 0
            while n_done < n_calls:
                shares = [
                    Share(
                        address,
                        max(0, min(CHUNK, n_calls - n_done - i * CHUNK)),
                        n_threads,
                        seed + n_done + i,
                    )
                    for i in range(n_processes)
                ]
                for share_outcomes in pool.map(lambda other, share: other.ask(share), others, shares):
                    outcomes.add(share_outcomes)
                n_done += sum(share.n_calls for share in shares)
                progress.update(task, completed=n_done)
                if "failed" in (held := serving.ask("left")):
                    return outcomes, held
            return outcomes, left_at_rest(lambda: serving.ask("left"))
        finally:
            for other in others:
                other.__exit__()


def directly(n_calls: int, seed: int, progress: Progress) -> tuple[Outcomes, str]:
    """Make the calls without gRPC; the result is as in `over_grpc`."""
    outcomes = Outcomes()
    task = progress.add_task("calls of the service", total=n_calls)
    with simulated_service() as service:
        n_done = 0
        while n_done < n_calls and service.failure is None:
            n = min(10 * CHUNK, n_calls - n_done)
            outcomes.add(on_service(service, n_calls=n, seed=seed + n_done))
            n_done += n
            progress.update(task, completed=n_done)
        return outcomes, left_at_rest(lambda: left(service))


def main() -> int:
    """Make the calls; print a table, failures and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.reused_ids", description="Request ids used again"
    )
    parser.add_argument("--calls", type=int, default=1_000_000, help="default: 1000000")
    parser.add_argument("--processes", type=int, default=2, help="caller processes, over gRPC (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument("--direct", action="store_true", help="call the service itself")
    flags = parser.parse_args()
    start = time.monotonic()
    with Progress(console=Console(stderr=True)) as progress:
        if flags.direct:
            outcomes, held = directly(flags.calls, flags.seed, progress)
        else:
            outcomes, held = over_grpc(flags.calls, flags.processes, flags.seed, progress)
    seconds = time.monotonic() - start
    table = Table(title=f"{outcomes.n.total():,} calls in {seconds:.0f} s")
    table.add_column("call")
    table.add_column("times", justify="right")
    for what, n in sorted(outcomes.n.items()):
        table.add_row(what, f"{n:,}")
    Console(width=100).print(table)
    for message in outcomes.wrong:
        print(f"WRONG: {message}")
    if held:
        print(f"LEFT: {held}")
    print(json.dumps(summary(outcomes, held, seconds, direct=flags.direct)))
    return 1 if outcomes.n_wrong or held else 0


def summary(outcomes: Outcomes, held: str, seconds: float, *, direct: bool) -> dict[str, Any]:
    """The figures, for the last line."""
    n_calls = outcomes.n.total()
    return {
        "benchmark": "reused_ids",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "direct": direct,
        "calls": n_calls,
        "seconds": round(seconds, 1),
        "calls_per_second": round(n_calls / seconds, 1),
        "outcomes": dict(sorted(outcomes.n.items())),
        "wrong": outcomes.n_wrong,
        "first_wrong": outcomes.wrong,
        "left": held,
        "passed": not outcomes.n_wrong and not held,
    }


if __name__ == "__main__":
    sys.exit(main())
