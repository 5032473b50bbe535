"""Recording and replay on simulated engines: the same batches again, whatever the policy and the load."""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import BadRecording, ConfigError, EngineError
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.engine_protocol import Engine, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service import recorder as recorder_module
from orca_jax.service.embeddings import pooled_prompt
from orca_jax.service.orca import Orca
from orca_jax.service.recorder import Recorder
from orca_jax.service.recording import Recording, read_recording
from orca_jax.service.replay import Replay
from orca_jax.service.scores import score_request
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token
from orca_jax.simulation.simulation import simulated_replay
from tests.host.engines import CONFIG, MODEL, SOON, PacedEngine, counting

SERVING = replace(CONFIG, n_slots=160, scheduling=SchedulingConfig(prefill_tokens=16))
CONFIGS = {
    "orca": CONFIG,
    "deterministic": replace(CONFIG, deterministic=True),
    "no overlap": replace(SERVING, overlap=False),
    "default": SERVING,
    # More places than users, so that there is always room for drafts.
    "drafts": replace(
        SERVING,
        max_batch_size=16,
        n_slots=512,
        scheduling=SchedulingConfig(prefill_tokens=16, speculative="ngram"),
    ),
    "fair": replace(SERVING, scheduling=SchedulingConfig(scheduling_policy="fair")),
    "priority": replace(SERVING, scheduling=SchedulingConfig(scheduling_policy="priority")),
}


def header(config: ServingConfig, engine: Engine) -> dict[str, Any]:
    return {
        "n_workers": engine.n_workers,
        "keeps_tokens": engine.keeps_tokens,
        "n_positions": MODEL.n_positions,
        "vocab_size": MODEL.vocab_size,
        "serving": json.loads(json.dumps(_as_dict(config))),
    }


def _as_dict(config: ServingConfig) -> dict[str, Any]:
    names = (name for name in ServingConfig.__dataclass_fields__ if name != "scheduling")
    scheduling = {name: getattr(config.scheduling, name) for name in SchedulingConfig.__dataclass_fields__}
    return {name: getattr(config, name) for name in names} | {"scheduling": scheduling}


def kv_manager(config: ServingConfig, n_workers: int) -> KVManager:
    return KVManager(
        n_blocks=config.n_blocks,
        block_size=config.block_size,
        n_rows=(n_workers + 1) * config.max_batch_size,
        max_blocks_per_row=-(-MODEL.n_positions // config.block_size),
        prefix_caching=config.scheduling.prefix_caching,
    )


def recorded(path: Path, config: ServingConfig, engine: Engine, *, max_bytes: int = 1 << 24) -> Orca:
    """A started service with a recording."""
    recorder = Recorder(path, max_bytes=max_bytes)
    recorder.begin(header(config, engine))
    kv = kv_manager(config, engine.n_workers)
    service = Orca(engine, kv, config=config, model=MODEL, seed=1, recorder=recorder)
    service.start()
    return service


def serve_randomly(service: Orca, seed: int, n_users: int = 6, n_each: int = 8) -> None:
    """Serve requests of users who come, go and hang up at any time."""

    def user(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        pause = threading.Event()
        for _ in range(n_each):
            pause.wait(rng.random() * 0.004)
            shared = list(range(rng.choice([8, 16, 30])))
            prompt = (
                shared if rng.random() < 0.5 else [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
            )
            sampling = SamplingParams(
                max_tokens=rng.randrange(1, 20),
                stop_token_ids=(rng.randrange(300),),
                ignore_eos=True,
                logprobs=rng.choice([None, 1]),
            )
            priority = (
                rng.randrange(3) if service.scheduler.config.scheduling.scheduling_policy == "priority" else 0
            )
            scheduling = SchedulingParams(priority=priority)
            if rng.random() < 0.1:
                given = score_request(service, prompt, 1)
                asked = given.prompt, given.rules
                if number % 2:
                    asked = pooled_prompt(service, prompt, "mean")
                service.submit(*asked).result(SOON)
                continue
            generation = service.submit(prompt, sampling, owner=f"key {number % 3}", scheduling=scheduling)
            if rng.random() < 0.2:
                pause.wait(rng.random() * 0.004)
                generation.close()
            else:
                generation.result(SOON)

    threads = [threading.Thread(target=user, args=(number,)) for number in range(n_users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


class ManyStages(PacedEngine):
    """Three batches in flight, and waits that arrivals interrupt."""

    def __init__(self, token: Callable[[Request, int], int] = counting, *, seconds: float) -> None:
        super().__init__(token, seconds=seconds)
        self.n_workers = 3

    def wait(self, iteration: Any, interrupted: Callable[[], bool]) -> Returned | None:
        self._never.wait(self.seconds)
        return None if interrupted() else SimulatedEngine.wait(self, iteration, interrupted)


@pytest.mark.parametrize("engine", [PacedEngine, ManyStages])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_replay_makes_the_same_batches_and_tokens(
    tmp_path: Path, name: str, engine: type[PacedEngine]
) -> None:
    config, path = CONFIGS[name], tmp_path / "recording"
    with recorded(path, config, engine(seconds=0.0003)) as service:
        if name == "fair":
            service.weigh_owners({"key 0": 9.0})
        serve_randomly(service, seed=1)
        assert (name == "drafts") == (service.speculation is not None and service.speculation.n_accepted > 0)
        iterations = [(record.request_ids, record.input_lengths) for record in service.timeline.iterations]
    recording = read_recording(path)
    assert len(recording.requests) == 48 and recording.why_last == ""
    assert list(recording.weights.values()) == ([9.0] if name == "fair" else [])
    assert any(request.scored_ids for request in recording.requests)
    assert any(request.pooling == "mean" for request in recording.requests)
    ids = [request.request_id for request in recording.requests]
    rows = [recording.iterations[i].rows for i in range(len(iterations))]
    assert [(tuple(ids[n] for n, _ in own), tuple(n for _, n in own)) for own in rows] == iterations

    report = simulated_replay(recording)
    assert report.difference == "" and report.n_iterations == len(iterations)
    again = replayed(recording, counting)
    assert again.same and again.n_outputs == again.n_requests == 48


def replayed(recording: Recording, token: Callable[[Request, int], int]) -> Any:
    n_workers = recording.header["n_workers"]
    engine = SimulatedEngine(VirtualClock(), token=token, n_workers=n_workers)
    config = ServingConfig.from_dict(recording.header["serving"])
    return Replay(recording, engine, kv_manager(config, n_workers), config=config).run()


def test_other_tokens_are_found_in_the_same_batches(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path, CONFIG, PacedEngine(seconds=0.0003)) as service:
        serve_randomly(service, seed=2, n_users=3, n_each=4)

    def one_other(request: Request, index: int) -> int:
        return counting(request, index) + (request.arrival == 3 and index == 0)

    recording = read_recording(path)
    assert replayed(recording, counting).same
    report = replayed(recording, one_other)
    n_output = len(recording.ends[3].output_ids)
    expected = [(recording.requests[3].request_id, 0)] if n_output else []
    assert (report.difference, report.other_outputs) == ("", expected)


def test_other_batches_are_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path, CONFIG, PacedEngine(seconds=0.0003)) as service:
        serve_randomly(service, seed=3, n_users=3, n_each=4)
    recording = read_recording(path)
    last = recording.requests[-1]
    recording.requests[-1] = replace(last, prompt_ids=(*last.prompt_ids, 7))
    report = simulated_replay(recording)
    assert report.difference.startswith("iteration ") and not report.same
    del recording.requests[-1]
    assert "was not issued" in simulated_replay(recording).difference or not simulated_replay(recording).same


def test_a_file_that_was_cut_off_is_replayed_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path, SERVING, ManyStages(seconds=0.0003)) as service:
        serve_randomly(service, seed=4)
    whole = path.read_bytes()
    n_whole = len(read_recording(path).iterations)
    for fraction in (0.2, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * fraction)])
        report = simulated_replay(read_recording(path))
        assert report.difference == "" and report.why_last == "the file ends there"
        assert 0 < report.n_iterations < n_whole


def test_keys_are_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path, SERVING, PacedEngine(seconds=0.0)) as service:
        salt = SchedulingParams(cache_salt="my salt")
        for prompt in ([1], [2]):
            rules = service.rules(SamplingParams(max_tokens=2))
            checked = service.check(prompt, rules, salt, tenant="sk-secret")
            service.submit(checked, rules, owner="sk-secret").result(SOON)
        service.submit([3], SamplingParams(max_tokens=2), owner="10.0.0.1").result(SOON)
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text and "my salt" not in text and "10.0.0.1" not in text
    first, second, third = read_recording(path).requests
    assert first.owner == second.owner != third.owner and first.cache_salt == second.cache_salt != ("",)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("trouble", ["full disk", "slow disk", "limit"])
def test_a_recording_that_must_stop_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    path, max_bytes = tmp_path / "recording", 1 << 20
    if trouble == "full disk":
        write, left = os.write, [3000]

        def full(file: int, data: bytes) -> int:
            if not left[0]:
                raise OSError(28, "No space left on device")
            n = min(len(data), left[0])
            left[0] -= n
            return write(file, data[:n])

        monkeypatch.setattr(recorder_module.os, "write", full)
    elif trouble == "slow disk":
        monkeypatch.setattr(recorder_module, "_POLL_SECONDS", SOON)
        monkeypatch.setattr(recorder_module, "_MAX_WAITING", 1000)
    else:
        max_bytes = 4000
    with recorded(path, CONFIG, PacedEngine(seconds=0.0003), max_bytes=max_bytes) as service:
        serve_randomly(service, seed=5, n_users=3)
        service.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True)).result(SOON)
    words = {"full disk": "No space left", "slow disk": "too slow", "limit": "limit of 4000 bytes"}[trouble]
    assert words in caplog.text and caplog.text.count("serving continues") == 1
    assert path.stat().st_size <= max_bytes
    recording = read_recording(path)
    assert "stopped" in recording.why_last or trouble == "full disk"
    assert simulated_replay(recording).same


def test_a_failing_engine_ends_what_can_be_replayed(tmp_path: Path) -> None:
    path, engine = tmp_path / "recording", PacedEngine(seconds=0.0)
    service = recorded(path, CONFIG, engine)
    service.submit([5], SamplingParams(max_tokens=5, ignore_eos=True)).result(SOON)
    engine.error = EngineError("gone")
    with pytest.raises(EngineError):
        service.submit([6], SamplingParams(max_tokens=5)).result(SOON)
    service.close()
    recording = read_recording(path)
    assert recording.why_last == "the engine failed"
    report = simulated_replay(recording)
    assert report.same and report.n_iterations >= 5


def test_a_pause_ends_what_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with recorded(path, SERVING, PacedEngine(seconds=0.0003)) as service:
        serve_randomly(service, seed=6, n_users=3, n_each=3)
        n_before = len(service.timeline.iterations)
        service.interludes.pause(running="continue", timeout=SOON)
        recorder = service._recorder  # pyright: ignore[reportPrivateUsage]
        assert recorder is not None
        turn = recorder.turn
        waiting = [service.submit([i], SamplingParams(max_tokens=3)) for i in range(4)]
        deadline = time.monotonic() + SOON
        while recorder.turn == turn and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        service.interludes.resume()
        for generation in waiting:
            generation.result(SOON)
    recording = read_recording(path)
    assert "paused" in recording.why_last
    report = simulated_replay(recording)
    assert report.same and n_before - 2 <= report.n_iterations <= n_before


def test_an_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text("before", encoding="utf-8")
    recorded(path, CONFIG, SimulatedEngine(VirtualClock(), token=hashed_token)).close()
    assert (tmp_path / "recording.old").read_text(encoding="utf-8") == "before"
    assert read_recording(path).requests == []


@pytest.mark.parametrize("where", ["missing/folder/file", "."])
def test_a_place_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="record is"):
        Recorder(tmp_path / where, max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a recording"),
        ("hello\n", "not a file of JSON lines"),
        ("{}\n", "not a recording"),
        ('{"orca_recording": 99}\n', "version 99"),
        ('{"orca_recording": 1}\n[]\n', "line 2"),
        ('{"orca_recording": 1}\n{"arrived": 0, "turn": 1}\n', "line 2"),
        ('{"orca_recording": 1}\n{"ends": 0, "turn": 1, "reason": "boredom"}\n', "line 2"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recording"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadRecording, match=words):
        simulated_replay(read_recording(path))


def test_a_recording_without_sizes(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text('{"orca_recording": 1}\n', encoding="utf-8")
    with pytest.raises(BadRecording, match="first line"):
        simulated_replay(read_recording(path))
