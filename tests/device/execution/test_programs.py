"""Programs compiled ahead, and compiles counted from JAX's events."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.errors import NotCompiledAhead
from orca_jax.execution.compile_counter import CompileCounter
from orca_jax.execution.programs import Program, ToCompile, compile_all
from tests.log_records import records_of

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    with closing(CompileCounter()) as one:
        yield one


def powers() -> Program:
    """A program for x to the power of `n`, with a form for each length and power."""
    return Program(jax.jit(lambda x, *, n: x**n, static_argnames="n"), key=lambda x, *, n: (x.shape[0], n))


def like(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((length,), jnp.float32, sharding=HERE)


def array(length: int) -> jax.Array:
    return jax.device_put(np.arange(length, dtype=np.float32), HERE)


def test_programs_compiled_in_parallel_are_the_ones_called(counter: CompileCounter) -> None:
    program = powers()
    forms = [(length, n) for length in range(1, 9) for n in range(1, 5)]
    calls: list[tuple[int, int, str]] = []
    compile_all(
        [ToCompile(f"{length}**{n}", partial(program.compile, like(length), n=n)) for length, n in forms],
        lambda *progress: calls.append(progress),
    )
    assert counter.counts().programs == len(forms)
    arrays = {length: array(length) for length, _ in forms}
    before = counter.counts().programs
    for length, n in forms:
        np.testing.assert_array_equal(program(arrays[length], n=n), np.arange(length, dtype=np.float32) ** n)
    assert counter.counts().programs == before, "nothing was compiled at a call"
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (len(forms), len(forms)) and {total for _, total, _ in calls} == {len(forms)}
    assert {name for _, _, name in calls} == {f"{length}**{n}" for length, n in forms}


def test_a_form_not_compiled_ahead_is_compiled_at_its_call(counter: CompileCounter) -> None:
    program = powers()
    program.compile(like(4), n=2)
    x = array(5)
    before = counter.counts().programs
    np.testing.assert_array_equal(program(x, n=2), np.arange(5, dtype=np.float32) ** 2)
    assert counter.counts().programs == before + 1


def test_a_form_is_compiled_once(counter: CompileCounter) -> None:
    program = powers()
    for _ in range(3):
        program.compile(like(4), n=3)
    assert counter.counts().programs == 1


def test_programs_are_lowered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    at_once, most = 0, 0

    def traced(x: jax.Array, *, n: int) -> jax.Array:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)  # Python's lock is free for the others
        at_once -= 1
        return x**n

    program = Program(jax.jit(traced, static_argnames="n"), key=lambda x, *, n: n)
    compile_all([ToCompile(str(n), partial(program.compile, like(4), n=n)) for n in range(4)])
    assert most == 1


def test_a_failed_compile_is_raised_and_cancels_the_rest() -> None:
    begun: list[str] = []

    def fail() -> None:
        raise ValueError("no such shape")

    programs = [
        ToCompile("bad", fail),
        *(ToCompile(str(i), partial(begun.append, str(i))) for i in range(500)),
    ]
    with pytest.raises(ValueError, match="no such shape"):
        compile_all(programs)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def test_the_counter_counts_jax_s_events_until_closed() -> None:
    x = array(3)
    with closing(CompileCounter()) as counter:
        jax.jit(lambda x: x + 41)(x)  # no program of ours
        assert counter.counts().programs == 1 and counter.counts().seconds > 0
        counted = counter.counts()
    jax.jit(lambda x: x + 42)(x)
    assert counter.counts() == counted
    counter.close()  # nothing the second time


def test_a_compile_after_ready_logs_one_warning_if_on_the_watched_thread(
    counter: CompileCounter, caplog: pytest.LogCaptureFixture
) -> None:
    x = array(3)
    jax.jit(lambda x: x + 51)(x)
    counter.watch(threading.Thread(name=threading.current_thread().name), "warn")
    jax.jit(lambda x: x + 52)(x)
    assert not records_of(caplog, "orca_jax.compile")
    counter.watch(threading.current_thread(), "warn")

    def late(x: jax.Array) -> jax.Array:
        return x + 53

    with caplog.at_level(logging.WARNING):
        for length in (3, 4, 5):
            jax.jit(late)(array(length))
    (record,) = records_of(caplog, "orca_jax.compile")
    assert "late" in record.getMessage()
    assert "after ready" in record.getMessage()
    assert counter.counts().programs == 5


def test_with_error_a_compile_is_refused_before_it_begins(counter: CompileCounter) -> None:
    x = array(3)
    known = jax.jit(lambda x: x + 61)
    known(x)
    before = counter.counts()
    counter.watch(threading.current_thread(), "error")
    with pytest.raises(NotCompiledAhead, match="would have to be compiled after the engine was ready"):
        jax.jit(lambda x: x + 62)(x)
    assert counter.counts() == before
    known(x)
    counter.watch(None, "error")
    jax.jit(lambda x: x + 63)(x)


def test_a_counter_can_be_closed_after_another_library_removed_all_listeners() -> None:
    counter = CompileCounter()
    jax.monitoring.unregister_event_duration_listener(counter._ends)
    counter.close()
    other = CompileCounter()
    other.close()
    with pytest.raises((AssertionError, ValueError)):
        jax.monitoring.unregister_event_listener(counter._event)
