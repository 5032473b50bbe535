"""llama.cpp, which a child process serves over HTTP (llama_cpp_child.py)."""

from typing import Any

from bench.peers.engine_process import EngineProcess
from bench.peers.http_engine import PLAY_SECONDS, ServedEngine

_MODULE = "bench.peers.llama_cpp_child"


class LlamaCpp(ServedEngine):
    """llama.cpp's server for a GGUF file, on a free loopback port; a context manager that ends it."""

    def __init__(self, name: str, python: str, *, play_seconds: float = PLAY_SECONDS) -> None:
        self._child = EngineProcess(name, python, _MODULE)
        super().__init__(name, self._child, play_seconds)

    def start(self, flags: dict[str, Any]) -> None:
        """Load the model and set `about`. Raises EngineEnded and AddressFailed."""
        self._child.start(flags)
        child = self._child.about
        # A play must find nothing in the slots of an earlier one; llama.cpp knows no salt.
        about = self.meet(child["url"], {"cache_prompt": False})
        self.about = {
            **about,
            "versions": child["versions"],
            "flags": {**child["flags"], **about["flags"]},
            "variables": child["variables"],
        }
