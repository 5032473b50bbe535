"""llama.cpp, which a child process serves over HTTP (llama_cpp_child.py)."""

from typing import Any, Self

from bench.peers.engine_process import PLAY_SECONDS, EngineProcess
from bench.peers.http_engine import HttpEngine
from bench.peers.played import Played
from bench.trace import Trace

_MODULE = "bench.peers.llama_cpp_child"


class LlamaCpp:
    """llama.cpp's server for a GGUF file, on a free loopback port; a context manager that ends it."""

    def __init__(self, name: str, python: str, *, play_seconds: float = PLAY_SECONDS) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._play_seconds = play_seconds
        self._process = EngineProcess(name, python, _MODULE)
        self._http: HttpEngine | None = None

    def start(self, flags: dict[str, Any]) -> None:
        """Load the model and set `about`. Raises EngineEnded and AddressFailed."""
        self._process.start(flags)
        about = self._process.about
        # A play must find nothing in the slots of an earlier one; llama.cpp knows no salt.
        body = {"cache_prompt": False}
        self._http = HttpEngine(self.name, about["url"], body=body, play_seconds=self._play_seconds)
        self._http.start()
        self.about = {
            **self._http.about,
            "versions": about["versions"],
            "flags": {**about["flags"], **self._http.about["flags"]},
            "variables": about["variables"],
        }

    def play(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.play(trace)

    def warm_up(self, trace: Trace) -> Played:
        """Like HttpEngine's."""
        assert self._http is not None, "start was not called"
        return self._http.warm_up(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._http is not None:
                self._http.__exit__(*error)
        finally:
            self._process.__exit__(*error)
