"""Stages in separate processes give one process's text over HTTP, and controllers forward ahead."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.server.repeated_streams import KnownStream, RepeatedStreams, asked
from bench.server.server_process import ServerProcess
from bench.server.worker_faults import known_streams, worker_pids
from orca_jax import LLM, SamplingParams
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.engine.stage_counters import IterationTimes
from tests.whole.workers.worker_harness import (
    MAX_PROMPT,
    N_OUTPUT,
    N_STREAMS,
    SIZES,
    SOON,
    OrcaWorker,
    is_there,
    until,
    write_model,
    write_shape,
)

SHORT_OF_SLOTS = ("--n-slots", "160", "--prefill-tokens", "3")
POLICIES = ((), ("--policy", "orca"), SHORT_OF_SLOTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def known(model: Path) -> list[KnownStream]:
    streams = known_streams(model, n=N_STREAMS, n_output=N_OUTPUT, longest=MAX_PROMPT)
    # Of most every choice is sure, greedy ones and sampled ones.
    for sampled in (True, False):
        alike = [stream for stream in streams if (stream.seed is not None) == sampled]
        assert len(alike) >= 8
        assert sum(stream.sure == stream.text for stream in alike) >= 0.75 * len(alike)
    assert len({stream.text for stream in streams}) == N_STREAMS
    return streams


def all_streamed(server: ServerProcess, known: Sequence[KnownStream]) -> list[str]:
    """Run every stream at once over HTTP; return what was wrong."""

    async def run() -> list[str]:
        async with RepeatedStreams(server.http_address, known, once=True) as streams:
            pass
        assert len(streams.ended) == len(known)
        return streams.wrong

    return asyncio.run(asyncio.wait_for(run(), SOON))


@pytest.mark.parametrize(
    ("n_stages", "tensor_parallel", "message"),
    [
        (2, 1, "2 stages of 2 layers, 1 device each, each in its own process"),
        pytest.param(
            *(4, 1, "4 stages of 1 layers, 1 device each, each in its own process"), marks=pytest.mark.long
        ),
        pytest.param(
            *(2, 2, "2 stages of 2 layers, 2 devices each, each in its own process"), marks=pytest.mark.long
        ),
    ],
)
def test_worker_processes_give_one_process_s_output(
    model: Path, known: list[KnownStream], n_stages: int, tensor_parallel: int, message: str
) -> None:
    split = ("--pipeline-parallel", str(n_stages), "--tensor-parallel", str(tensor_parallel))
    with ServerProcess((str(model), "--worker-processes", *split, *SIZES)) as server:
        server.wait_until_ready(SOON)
        assert message in server.stderr()
        pids = worker_pids(server)
        assert len(set(pids)) == n_stages and all(map(is_there, pids))
        assert all_streamed(server, known) == []
        status, ready = asyncio.run(asked(server.http_address, "/ready"))
        assert (status, ready) == (200, '{"status":"ready"}')
        figures = asyncio.run(asked(server.http_address, "/metrics"))[1]
        assert 'orca_worker_losses_total{model_name="small"} 0.0' in figures
        assert server.stop() == 0
        until(lambda: not any(map(is_there, pids)), "the workers' end", 10)
    assert "Traceback" not in server.stderr()


@pytest.mark.long
def test_workers_that_somebody_else_has_started_do_the_same(
    model: Path, known: list[KnownStream], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough\n")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                OrcaWorker(
                    model,
                    (
                        *("--stage", stage, "--of", "2", "--dtype", "float32"),
                        "--control-secret-file",
                        str(secret),
                    ),
                )
            )
            for stage in ("1", "2")
        ]
        addresses = ",".join(worker.listens().address for worker in workers)
        assert re.fullmatch(r"127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", addresses)
        flags = (str(model), "--workers", addresses, "--control-secret-file", str(secret), *SIZES)
        for policy in POLICIES:  # the workers stay, and take the next server
            with ServerProcess((*flags, *policy)) as server:
                server.wait_until_ready(SOON)
                assert all_streamed(server, known) == []
                figures = asyncio.run(asked(server.http_address, "/metrics"))[1]
                preempted = re.search(r"^orca_num_preemptions_total\{.*\} (\S+)$", figures, re.MULTILINE)
                assert preempted is not None and (float(preempted[1]) > 0) == (policy == SHORT_OF_SLOTS)
                assert server.stop() == 0
            assert "a secret that" not in server.stderr() + workers[0].stderr() + workers[1].stderr()


WIDE = 32  # positions of a model that keeps a device busy for tens of milliseconds


@contextmanager
def after_long_initiations(tmp_path: Path) -> Iterator[list[tuple[IterationTimes, ...]]]:
    """The times at which both stages took and finished each long iteration of twenty initiation phases."""
    model = write_shape(tmp_path / "wide", n_positions=WIDE, n_embd=1536, n_inner=6144, n_layer=2)
    with ExitStack() as stack:
        options = ("--of", "2", "--load-format", "dummy", "--dtype", "float32")
        workers = [
            stack.enter_context(OrcaWorker(model, ("--stage", stage, *options))) for stage in ("1", "2")
        ]
        llm = stack.enter_context(
            LLM(
                model,
                workers=[worker.listens().address for worker in workers],
                load_format="dummy",
                max_batch_size=2,
                max_batch_tokens=WIDE,
            )
        )
        prompts = [[1 + (i + j) % 100 for j in range(WIDE - 4)] for i in range(20)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        scheduler = llm.service.scheduler
        remote = getattr(scheduler.engine, "workers")  # noqa: B009 (the engine's type does not say it)
        assert isinstance(remote, RemoteWorkers)
        iterations = llm.service.timeline.iterations
        until(lambda: len(remote.stages[0].times) == len(iterations), "the last one's times")
        both = list(zip(*(stage.times for stage in remote.stages), strict=True))
        assert [times.iteration for times, _ in both] == list(range(len(iterations)))
        yield [
            times
            for times, iteration in zip(both, iterations, strict=True)
            if iteration.n_tokens >= WIDE // 2
        ]


@pytest.mark.long
def test_a_control_message_reaches_the_next_stage_before_this_device_is_done(tmp_path: Path) -> None:
    with after_long_initiations(tmp_path) as times:
        ahead = [second.received < first.done for first, second in times]
        assert len(ahead) >= 20
        assert sum(ahead) >= 0.8 * len(ahead), times
