"""Loads the checkpoints of a training run into a running engine, each as it is finished."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from orca_jax.errors import EngineError, OrcaError, RequestsStillRunning, ServiceClosed
from orca_jax.service.engine_controls import EngineControls

# A step's directory: as Orbax names it, and as trainers do that write safetensors.
_STEP = re.compile(r"(?:(?:step|checkpoint|global_step|ckpt|iter|run)[-_]?)?(\d{1,15})")
_SECONDS = 1.0  # between two looks
_UPDATE_SECONDS = 60.0  # for another change of the engine to end
_MOST_TRIED = 8  # steps in one look
_MOST_FILES = 10_000  # of a step that could not be loaded


class CheckpointFollower:
    """Loads the newest complete step in `directory` whenever its number is above the weights' version.

    Each step is a directory with a number, such as `100`, `step-100` or `checkpoint-100`; under any other
    name, as Orbax and careful writers use until a step is complete, it is not seen. The number becomes the
    version of the weights. A step is read into host memory while requests run, and requests go on with the
    new weights.

    A step that cannot be loaded is reported to `on_event` and left out until its files change; nothing that
    is in the directory can end the engine. `start` begins to look on a thread, and `close` ends that.
    """

    def __init__(
        self,
        directory: Path,
        controls: EngineControls,
        *,
        on_event: Callable[[str], object],
        seconds: float = _SECONDS,
    ) -> None:
        self._directory = directory
        self._controls = controls
        self._on_event = on_event
        self._seconds = seconds
        self._failed: dict[Path, int] = {}  # steps that could not be loaded, with a hash of their files
        self._trouble = ""  # what was reported last about the directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)

    def start(self) -> None:
        """Begin to look for steps."""
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Look no more. A step that is being loaded has up to `timeout` seconds to end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def look(self) -> bool:
        """Load the newest complete step if it is newer than the weights; return whether one was loaded.

        Raises ServiceClosed, or EngineError if the engine has failed.
        """
        tried = set[Path]()
        for number, step in self._newer():
            tried.add(step)
            files = _hash_of_files(step)  # before it is read, so that no change is missed
            if self._failed.get(step) == files:
                continue
            try:
                self._controls.update_weights(
                    str(step), version=number, running="continue", timeout=_UPDATE_SECONDS, read_ahead=True
                )
            except RequestsStillRunning as error:  # another change goes on
                self._on_event(f"step {number} waits: {error}")
                return False
            except (EngineError, ServiceClosed):
                raise
            except Exception as error:  # whatever Orbax and TensorStore make of damaged files
                self._failed[step] = files
                why = str(error) if isinstance(error, OrcaError) else f"{type(error).__name__}: {error}"
                self._on_event(f"step {number} is left out until its files change: {why}")
                continue
            self._on_event(f"loaded step {number} from {step}")
            return True
        for step in self._failed.keys() - tried:  # they are gone, or old by now
            del self._failed[step]
        return False

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self.look()
            except (EngineError, ServiceClosed) as error:
                if not self._stop.is_set():
                    self._on_event(f"{self._directory} is followed no more: {error}")
                return

    def _newer(self) -> Iterator[tuple[int, Path]]:
        """The steps above the present version, the newest first."""
        now = self._controls.weights_version
        steps: list[tuple[int, Path]] = []
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    match = _STEP.fullmatch(entry.name)
                    if match is not None and int(match[1]) > now and entry.is_dir():
                        steps.append((int(match[1]), Path(entry.path)))
            trouble = ""
        except OSError as error:
            trouble = f"{self._directory} cannot be read, and is looked at again: {error.strerror}"
        if trouble and trouble != self._trouble:
            self._on_event(trouble)
        self._trouble = trouble
        yield from sorted(steps, reverse=True)[:_MOST_TRIED]


def _hash_of_files(step: Path) -> int:
    """A hash of the files' names, sizes and times, which changes as a step is written further."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(step) for name in names)
    found: list[tuple[str, int, int]] = []
    for path in islice(paths, _MOST_FILES):
        with suppress(OSError):  # it is gone
            about = os.stat(path)
            found.append((path, about.st_size, about.st_mtime_ns))
    return hash(tuple(sorted(found)))
