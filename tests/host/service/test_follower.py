"""The follower loads the newest complete step, once, and outlives everything that a directory can hold."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import CorruptFile, EngineError, RequestsStillRunning, ServiceClosed
from orca_jax.service.follower import CheckpointFollower

SOON = 30.0


ERRORS: dict[str, Callable[[], Exception]] = {
    "damaged": lambda: CorruptFile("the file ends at byte 7"),
    "odd": lambda: ValueError("from a library"),
    "busy": lambda: RequestsStillRunning("another change goes on"),
    "closed": lambda: ServiceClosed("the service was closed"),
    "failed": lambda: EngineError("a device failed"),
}


class Controls:
    """Controls whose updates read a step's one file: its text is "good" or the error to raise."""

    def __init__(self) -> None:
        self.weights_version = 0
        self.read = list[str]()

    def update_weights(self, weights: str, *, version: int, **options: Any) -> int:
        assert options.pop("running") == "continue" and options.pop("read_ahead") is True
        assert version > self.weights_version
        self.read.append(Path(weights).name)
        text = (Path(weights) / "weights").read_text()
        if text in ERRORS:
            raise ERRORS[text]()
        self.weights_version = version
        return version


class Run:
    """A training run's folder, and a follower of it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.controls, self.events = folder, Controls(), list[str]()
        controls: Any = self.controls
        self.follower = CheckpointFollower(folder, controls, on_event=self.events.append, **options)

    def save(self, name: str, text: str = "good") -> None:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "weights").write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_newest_step_is_loaded_once(run: Run) -> None:
    assert not run.follower.look()
    for name in ("9", "100", "20"):
        run.save(name)
    assert run.follower.look()
    assert not run.follower.look()
    run.save("checkpoint-99")  # older
    assert not run.follower.look()
    run.save("checkpoint-300")
    run.save("step_200")
    assert run.follower.look()
    run.save("run-400")
    assert run.follower.look()
    assert run.controls.read == ["100", "checkpoint-300", "run-400"] and run.controls.weights_version == 400
    assert [event.split(" from")[0] for event in run.events] == [
        *("loaded step 100", "loaded step 300", "loaded step 400"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "7.orbax-checkpoint-tmp-12",
        "7.orbax-checkpoint-tmp",
        "tmp-7",
        "tmp-checkpoint-7",
        "checkpoint-7.tmp",
        ".7",
        "best",
        "7" * 16,
    ],
)
def test_steps_under_way_are_not_seen(run: Run, name: str) -> None:
    run.save(name)
    (run.folder / "8").write_text("a file")
    assert not run.follower.look()
    assert run.controls.read == [] == run.events
    (run.folder / name).rename(run.folder / "7")
    assert run.follower.look()


@pytest.mark.parametrize("text", ["damaged", "odd"])
def test_a_damaged_step_is_reported_and_left_out_until_it_changes(run: Run, text: str) -> None:
    run.save("3")
    run.save("5", text)
    assert run.follower.look() and run.controls.weights_version == 3  # the one before it
    for _ in range(3):
        assert not run.follower.look()
    run.save("4")
    assert run.follower.look() and run.controls.weights_version == 4
    assert run.controls.read == ["5", "3", "4"]
    assert run.events[0].startswith("step 5 is left out until its files change: ")
    assert len(run.events) == 3
    run.save("5", "good")
    assert run.follower.look() and run.controls.weights_version == 5


def test_a_step_waits_for_another_change(run: Run) -> None:
    run.save("3", "busy")
    run.save("2")
    assert not run.follower.look()
    assert run.controls.read == ["3"]  # an older one would come too late
    assert run.events == ["step 3 waits: another change goes on"]
    run.save("3", "good")
    assert run.follower.look()


def test_a_folder_that_comes_later(tmp_path: Path) -> None:
    run = Run(tmp_path / "later")
    for _ in range(3):
        assert not run.follower.look()
    assert run.events == [
        f"{tmp_path / 'later'} cannot be read, and is looked at again: No such file or directory"
    ]
    (tmp_path / "later").mkdir()
    run.save("1")
    assert run.follower.look()


@pytest.mark.parametrize("text", ["closed", "failed"])
def test_the_thread_ends_with_the_engine(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path, seconds=0.001)
    run.save("1", text)
    run.follower.start()
    for thread in [each for each in threading.enumerate() if each.name == "follow"]:  # it may have ended
        thread.join(SOON)
        assert not thread.is_alive()
    assert [event.split(":")[0] for event in run.events] == [f"{tmp_path} is followed no more"]
    run.follower.close()


def test_close_ends_the_thread(tmp_path: Path) -> None:
    run = Run(tmp_path, seconds=1000.0)
    run.follower.close()  # it was never started
    run = Run(tmp_path, seconds=1000.0)
    run.follower.start()
    run.follower.close(SOON)
    assert not any(each.name == "follow" for each in threading.enumerate())
