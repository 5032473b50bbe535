"""New weights, sleep and pause of a service, on engines without a device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import (
    ConfigError,
    EngineAsleep,
    EngineError,
    RequestsStillRunning,
    ServiceClosed,
    TensorMismatch,
)
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.interludes import Running
from orca_jax.service.orca import SCHEDULER_THREAD, Orca
from tests.host.engines import CONFIG, SOON, FakeMemory, GatedEngine, PacedEngine, at_rest, orca, simulated

TEN = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)


@contextmanager
def serving(
    engine: Engine, config: ServingConfig = CONFIG
) -> Iterator[tuple[Orca, FakeMemory, EngineControls]]:
    memory = FakeMemory()
    with orca(engine, config=config) as service:
        yield service, memory, EngineControls(service, memory)


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def update(controls: EngineControls, weights: object = "second", running: Running = "finish") -> int:
    return controls.update_weights(weights, version=None, running=running, timeout=SOON)


def test_an_idle_engine_takes_new_weights_at_once():
    with serving(simulated()) as (service, memory, controls):
        assert controls.weights_version == 0
        assert update(controls) == 1 == controls.weights_version
        assert memory.weights == "second"
        assert memory.threads == {SCHEDULER_THREAD}
        assert controls.update_weights("third", version=7, running="finish", timeout=SOON) == 7
        result = service.submit([1, 2], TEN).result(SOON)
        assert result.weights_version == 7 and result.weights_versions == ((0, 7),)
        with pytest.raises(ConfigError, match="version is 7, and the engine has version 7"):
            controls.update_weights("fourth", version=7, running="finish", timeout=SOON)
        assert memory.weights == "third"


def test_running_requests_finish_and_later_ones_wait():
    engine = GatedEngine()
    with serving(engine) as (service, memory, controls):
        first = service.submit([1], TEN)
        assert engine.waited_for.wait(SOON)
        updating = in_thread(lambda: update(controls))
        while not controls.busy:
            pass
        second = service.submit([2], TEN)
        engine.let(9)
        assert first.next_piece(SOON) is not None
        assert memory.done == [] and service.pool.n_waiting == 1
        engine.let(1)
        assert first.result(SOON).weights_version == 0
        updating.join(SOON)
        assert memory.done == ["install second"]
        engine.let(10)
        assert second.result(SOON).weights_version == 1
        assert at_rest(service)


@pytest.mark.parametrize("on_demand", [True, False])
def test_running_requests_continue(on_demand: bool):
    """Tokens are computed again: the engine checks that each row begins where its cache ends."""
    scheduling = SchedulingConfig() if on_demand else CONFIG.scheduling
    with serving(PacedEngine(seconds=0.002), replace(CONFIG, scheduling=scheduling)) as parts:
        service, memory, controls = parts
        running = [service.submit([i, 2, 3], LONG) for i in range(6)]
        assert running[0].next_piece(SOON) is not None
        version = update(controls, running="continue")
        results = [generation.result(SOON) for generation in running]
        assert memory.weights == "second"
        for i, result in enumerate(results):
            assert result.token_ids == [(i + k) % 300 for k in range(50)]
            assert result.weights_version == version
            changes = result.token_versions
            assert changes == sorted(changes) and len(changes) == 50
        assert results[0].weights_versions[0] == (0, 0)
        assert results[5].weights_versions == ((0, version),)  # it had to wait for the others
        assert at_rest(service)


def test_running_requests_are_aborted_and_waiting_ones_are_not():
    engine = GatedEngine()
    with serving(engine) as (service, memory, controls):
        running = [service.submit([i], TEN) for i in range(4)]
        waiting = service.submit([9], TEN)
        engine.let(2)
        assert running[0].next_piece(SOON) is not None
        engine.let(1000)
        update(controls, running="abort")
        ended = [generation.result(SOON) for generation in running]
        last = waiting.result(SOON)
        assert last.finish_reason is FinishReason.LENGTH
        assert all(result.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH) for result in ended)
        assert memory.weights == "second"


def test_what_takes_too_long_is_given_up():
    engine = GatedEngine()
    with serving(engine) as (service, memory, controls):
        running = service.submit([1], TEN)
        assert engine.waited_for.wait(SOON)
        engine.let(1)
        with pytest.raises(RequestsStillRunning, match=r"1 requests were still running after 0\.05 seconds"):
            controls.update_weights("second", version=None, running="finish", timeout=0.05)
        engine.let(9)
        assert running.result(SOON).weights_version == 0
        assert memory.done == [] and controls.weights_version == 0
        engine.let(10)
        assert service.submit([1], TEN).result(SOON).token_ids == running.result().token_ids


def test_a_pause_holds_running_and_new_requests():
    engine = GatedEngine()
    with serving(engine) as (service, memory, controls):
        running = service.submit([1], TEN)
        assert engine.waited_for.wait(SOON)
        pausing = in_thread(lambda: controls.pause(running="continue", timeout=SOON))
        while not controls.busy:
            pass
        engine.let(100)
        pausing.join(SOON)
        assert controls.paused
        new = service.submit([2], TEN)
        piece = running.next_piece(SOON)
        assert piece is not None and piece.finish_reason is None
        with pytest.raises(RequestsStillRunning, match="in the middle of 1 requests"):
            update(controls)
        n_left = service.scheduler.n_scheduled
        assert (n_left, service.pool.n_waiting) == (0, 1)
        running.cancel()
        assert running.result(SOON).finish_reason is FinishReason.CANCELLED
        controls.resume()
        assert new.result(SOON).finish_reason is FinishReason.LENGTH
        assert memory.done == []


def test_an_engine_that_sleeps_refuses_requests_until_woken():
    with serving(simulated()) as (service, memory, controls):
        controls.sleep(1, running="finish", timeout=SOON)
        assert (controls.asleep, memory.level) == (1, 1)
        with pytest.raises(EngineAsleep, match="must be woken first"):
            service.submit([1], TEN)
        controls.sleep(2, running="finish", timeout=SOON)
        controls.sleep(1, running="finish", timeout=SOON)
        assert controls.asleep == 2
        assert update(controls) == 1
        controls.wake_up(timeout=SOON)
        controls.wake_up(timeout=SOON)
        assert memory.done == ["release 1", "release 2", "install second", "restore"]
        assert service.submit([1], TEN).result(SOON).weights_version == 1
        for level in (0, 3, True):
            with pytest.raises(ConfigError, match="level is"):
                controls.sleep(level, running="finish", timeout=SOON)


def test_a_request_in_the_middle_sleeps_with_the_engine():
    with serving(PacedEngine(seconds=0.002)) as (service, _, controls):
        running = service.submit([1], LONG)
        assert running.next_piece(SOON) is not None
        controls.sleep(2, running="continue", timeout=SOON)
        assert service.scheduler.n_scheduled == 0
        controls.wake_up(timeout=SOON)
        result = running.result(SOON)
        assert result.token_ids == [1 + k for k in range(50)]
        assert result.weights_versions == ((0, 0),)


def test_wrong_weights_change_nothing():
    with serving(simulated()) as (service, memory, controls):
        with pytest.raises(TensorMismatch, match="expected"):
            update(controls, "wrong")
        assert (memory.weights, controls.weights_version) == ("first", 0)
        assert service.submit([1], TEN).result(SOON).weights_version == 0


def test_a_failure_midway_is_the_engines():
    with serving(simulated()) as (service, _, controls):
        with pytest.raises(EngineError, match="the device failed midway"):
            update(controls, "fails")
        with pytest.raises(EngineError, match="the device failed midway"):
            service.submit([1], TEN)
        with pytest.raises(EngineError, match="the device failed midway"):
            update(controls)


def test_closing_ends_what_waits():
    engine = GatedEngine()
    errors = list[BaseException]()
    with serving(engine) as (service, memory, controls):
        running = service.submit([1], TEN)
        assert engine.waited_for.wait(SOON)

        def ask() -> None:
            try:
                controls.sleep(1, running="finish", timeout=SOON)
            except ServiceClosed as error:
                errors.append(error)

        asking = in_thread(ask)
        while not controls.busy:
            pass
        closing = in_thread(service.close)
        engine.let(100)
        closing.join(SOON)
        assert running.result(SOON).finish_reason is not None
    asking.join(SOON)
    assert not asking.is_alive()
    assert errors or memory.done == ["release 1"]


def test_cached_blocks_of_old_weights_are_never_found():
    scheduling = SchedulingConfig()
    with serving(simulated(), replace(CONFIG, scheduling=scheduling)) as (service, _, controls):
        prompt = [*range(30)]
        for n_cached in (0, 24):
            assert service.submit(prompt, TEN).result(SOON).n_cached == n_cached
        checked = service.check(prompt, service.rules(TEN))  # hashed before the update
        update(controls)
        for n_cached in (0, 24):
            assert service.submit(prompt, TEN).result(SOON).n_cached == n_cached
        update(controls)
        assert service.submit(checked, service.rules(TEN)).result(SOON).n_cached == 0
