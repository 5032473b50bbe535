"""A server is ready with the programs of a few buckets, and compiles the others while it serves."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax import LLM, SamplingParams
from orca_jax.config import EngineConfig
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.programs import Program
from orca_jax.launch import loaded_engine, local_engine
from orca_jax.launch.compile_process import CompileProcess
from orca_jax.launch.local_engine import LaterPrograms, first_buckets, later_buckets
from orca_jax.workers.child_process import ChildProcess
from tests.endpoint.harness import until

SOON = 60.0
SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 512, "max_batch_tokens": 64, "seed": 1}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("buckets", "max_rows", "first", "later"),
    [
        ((1, 8, 16, 32, 48, 64, 96, 128, 2048), 32, (32, 2048), [64, 128, 1, 8, 16, 48, 96]),
        ((1, 8, 16), 4, (8, 16), [1]),
        ((1, 8, 16), 100, (16,), [1, 8]),
        ((1, 8, 64, 100), 1, (1, 100), [8, 64]),
    ],
)
def test_the_order_of_the_buckets(
    buckets: tuple[int, ...], max_rows: int, first: tuple[int, ...], later: list[int]
) -> None:
    assert first_buckets(buckets, max_rows) == first
    assert later_buckets(buckets, max_rows) == later


@given(st.sets(st.integers(1, 10_000), min_size=1), st.integers(1, 300))
def test_the_first_buckets_hold_every_batch(sizes: set[int], max_rows: int) -> None:
    buckets = tuple(sorted(sizes))
    first = first_buckets(buckets, max_rows)
    assert first[-1] == buckets[-1] and all(size < max_rows for size in sizes if size < first[0])
    assert sorted([*first, *later_buckets(buckets, max_rows)]) == list(buckets)


Started = Callable[..., LLM]


@pytest.fixture
def started(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """An engine with compiled programs, which compiles them all by itself."""
    monkeypatch.setattr(loaded_engine, "_described", lambda *_: None)

    def start(**changes: Any) -> LLM:
        settings = {"model": str(tiny_directory), **SIZES, **changes}
        return LLM.from_config(EngineConfig(**settings, compile_ahead=True))

    return start


class Gate:
    """Lets as many of the later programs compile as `let` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may, self.compiled = threading.Semaphore(0), 0
        compile_now = Program.compile

        def when_let(program: Program, *shapes: Any, **static: Any) -> None:
            if threading.current_thread().name == "compile later":
                assert self._may.acquire(timeout=SOON)
                self.compiled += 1
            compile_now(program, *shapes, **static)

        monkeypatch.setattr(Program, "compile", when_let)

    def let(self, n: int) -> None:
        self._may.release(n)

    def open(self) -> None:
        self.let(100_000)


def later_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "compile later"]


def buckets_of(llm: LLM) -> set[int]:
    return {record.bucket for record in llm.service.timeline.iterations}


def test_it_serves_in_the_first_buckets_and_then_in_all(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started() as llm:
        expected = llm.generate([[5, 6, 7], list(range(40))], GREEDY)
        all_buckets = buckets_of(llm)
    assert 48 in all_buckets  # for the longer prompt
    gate = Gate(monkeypatch)
    with started(ready_early=True) as llm:
        early = llm.generate([[5, 6, 7], list(range(40))], GREEDY)
        assert [result.token_ids for result in early] == [result.token_ids for result in expected]
        assert buckets_of(llm) <= {8, 64}
        before = llm.compiles.programs
        (thread,) = later_threads()
        gate.let(4)
        until(lambda: gate.compiled == 4, "some later programs")
        for its_end in (False, True):  # in the midst of it, and at its end
            if its_end:
                gate.open()
                thread.join(SOON)
            later = llm.generate([[5, 6, 7], list(range(40))], GREEDY)
            assert [result.token_ids for result in later] == [result.token_ids for result in expected]
        llm.generate([list(range(100, 140))], GREEDY)  # nothing of it is in the prefix cache
        assert not thread.is_alive() and 40 in buckets_of(llm)
        assert llm.compiles.programs > before and gate.compiled


def test_nothing_compiles_while_a_request_waits(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_compile=error, a missing program on the scheduler's thread would make the engine fail."""
    gate = Gate(monkeypatch)
    gate.open()
    with started(ready_early=True, on_compile="error") as llm:
        for _ in range(3):
            prompts = [list(range(n)) for n in range(1, 60, 3)]
            params = [
                SamplingParams(
                    max_tokens=3, temperature=1.0, top_k=i % 3, logprobs=i % 2 or None, ignore_eos=True
                )
                for i in range(len(prompts))
            ]
            llm.generate(prompts, params)


def test_closing_stops_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, close = Gate(monkeypatch), LaterPrograms.close

    def closed(later: LaterPrograms) -> None:
        opening = threading.Thread(target=lambda: later._stop.wait(SOON) and gate.open())
        opening.start()
        close(later)
        opening.join(SOON)

    monkeypatch.setattr(LaterPrograms, "close", closed)
    llm = started(ready_early=True)
    (thread,) = later_threads()
    llm.close()
    assert not thread.is_alive() and gate.compiled <= 1


def test_a_program_that_cannot_be_compiled_leaves_the_others_serving(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_now = Program.compile

    def fails(program: Program, *shapes: Any, **static: Any) -> None:
        if threading.current_thread().name == "compile later":
            raise RuntimeError("no room for it")
        compile_now(program, *shapes, **static)

    monkeypatch.setattr(Program, "compile", fails)
    with started(ready_early=True) as llm:
        for each in later_threads():
            each.join(SOON)
        assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 6
        assert buckets_of(llm) == {8}
    assert "no room for it" in caplog.text and local_engine.LOGGER.name in caplog.text


@pytest.mark.matrix(but=["changes0"])
@pytest.mark.parametrize(
    "changes", [{"ready_early": False}, {"ready_early": True, "deterministic": True, "max_batch_tokens": 512}]
)
def test_a_deterministic_engine_waits_for_all(started: Started, changes: dict[str, Any]) -> None:
    with started(**changes) as llm:
        assert not later_threads()
        n_programs = llm.compiles.programs
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.compiles.programs == n_programs


@pytest.fixture
def with_process(tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """An engine that is ready early, for which another process compiles into a folder of the test.

    The process has a usual priority: beside other tests it would wait for minutes.
    """
    monkeypatch.setattr(ChildProcess, "yield_processor", lambda process: None)

    def start() -> LLM:
        settings = {"model": str(tiny_directory), **SIZES, "compile_cache": str(tmp_path)}
        return LLM.from_config(EngineConfig(**settings, compile_ahead=True, ready_early=True))

    yield start
    keep_compiled_programs(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[CompileProcess]:
    """All processes that compile, in the order of their starts."""
    made = list[CompileProcess]()

    class Kept(CompileProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(local_engine, "CompileProcess", Kept)
    return made


def wait_for_all() -> None:
    """Wait for the later programs."""
    for each in later_threads():
        each.join(240.0)
    assert not later_threads()


def is_gone(process: CompileProcess) -> bool:
    return not Path(f"/proc/{process.pid}").exists()


@pytest.mark.timeout(600)
def test_another_process_compiles_and_this_one_reads(
    with_process: Started, processes: list[CompileProcess]
) -> None:
    with with_process() as llm:
        early, first = llm.generate([[5, 6, 7], list(range(40))], GREEDY), llm.compiles
        until(lambda: bool(processes), "its start")
        wait_for_all()
        counts = llm.compiles
        assert counts.programs - first.programs == counts.from_disk - first.from_disk > 0
        later = llm.generate([[5, 6, 7], list(range(40))], GREEDY)
        assert [result.token_ids for result in later] == [result.token_ids for result in early]
        llm.generate([list(range(100, 140))], GREEDY)
        assert 40 in buckets_of(llm) and is_gone(processes[0])
    with with_process() as llm:
        wait_for_all()
        assert llm.compiles.programs == llm.compiles.from_disk
    assert len(processes) == 1, "the second start found all programs"


@pytest.mark.timeout(600)
def test_this_process_compiles_what_a_killed_one_leaves(
    with_process: Started, processes: list[CompileProcess], caplog: pytest.LogCaptureFixture
) -> None:
    with with_process() as llm:
        until(lambda: bool(processes), "its start")
        processes[0].kill()
        wait_for_all()
        assert is_gone(processes[0])
        llm.generate([list(range(100, 140))], GREEDY)
        assert 40 in buckets_of(llm)
        assert llm.compiles.programs > llm.compiles.from_disk
    assert "ended with status -9" in caplog.text and "this process compiles the other programs" in caplog.text


def test_closing_ends_the_other_process(
    with_process: Started, processes: list[CompileProcess], caplog: pytest.LogCaptureFixture
) -> None:
    llm = with_process()
    until(lambda: bool(processes), "its start")
    llm.close()
    assert not later_threads() and is_gone(processes[0])
    assert not caplog.records
