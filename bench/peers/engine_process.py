"""An engine in a process with its own environment, behind a pipe of JSON lines (other end: child.py)."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bench.peers.played import Played
from orca_jax.workers.json_child import ChildSilent, JsonChild
from server.load.trace import Trace

START_SECONDS, PLAY_SECONDS = 900.0, 1800.0
_ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 30.0  # for an engine to exit by itself


class EngineEnded(Exception):
    """An engine's process ended or did not answer in time; the message has the end of its stderr."""


class EngineProcess:
    """A context manager around an engine's process. `about` describes the engine after `start`."""

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        variables: Mapping[str, str] | None = None,
        *,
        play_seconds: float = PLAY_SECONDS,
    ) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._play_seconds = play_seconds
        try:
            self._child = JsonChild(
                [python, "-m", module],
                folder=_ROOT,  # contains `bench`
                environment={**os.environ, **(variables or {})},
                grace_seconds=_GRACE_SECONDS,
            )
        except OSError as error:
            raise EngineEnded(f"{name} did not start: {error}") from error

    def start(self, flags: dict[str, Any], seconds: float = START_SECONDS) -> None:
        """Load the model and set `about`. Raises EngineEnded."""
        self.about = self._ask(flags, seconds)

    def play(self, trace: Trace) -> Played:
        """Play a trace once. Raises EngineEnded.

        First tokens are recorded unless all requests arrive at once, when only the throughput counts.
        """
        streams = any(request.arrival for request in trace)
        question = {
            "prompts": [request.prompt_ids for request in trace],
            "n_outputs": [request.n_output for request in trace],
            "arrivals": [request.arrival for request in trace],
            "after": [request.after for request in trace],
            "streams": streams,
            "salt": secrets.token_hex(8),
        }
        answer = self._ask(question, self._play_seconds)
        return Played(
            seconds=answer["seconds"],
            latency=tuple(answer["latency"]),
            n_tokens=tuple(map(len, answer["token_ids"])),
            token_ids=tuple(map(tuple, answer["token_ids"])),
            first_token=None if answer["first_token"] is None else tuple(answer["first_token"]),
        )

    def warm_up(self, trace: Trace) -> Played:
        """Play a trace once, with its tokens. Raises EngineEnded."""
        return self.play(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        how = "ended"
        try:
            answer = self._child.ask(question, seconds)
        except ChildSilent:
            answer, how = None, f"gave no answer within {seconds:g} seconds, and was killed"
        if answer is None:
            self._child.wait(_GRACE_SECONDS)
            raise EngineEnded(f"{self.name} {how}:\n{self._child.last_words()}")
        return answer
