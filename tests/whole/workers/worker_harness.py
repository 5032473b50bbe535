"""Shared parts of tests of worker processes: a model of four layers, `orca worker`, and its ports."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench.server.server_process import ServerProcess
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from tests.device.checkpoint.tiny_checkpoint import GPT2, gpt2_tensors, write_checkpoint, write_json
from tests.places import ROOT
from tests.xla_flags import xla_flags

SOON = 120.0
END = 128
N_POSITIONS = 32  # few buckets, and so few programs to compile
N_OUTPUT = 24
MAX_PROMPT = 8
N_STREAMS = 24
CONFIG: dict[str, Any] = GPT2 | {
    "vocab_size": END + 1,
    "n_positions": N_POSITIONS,
    "n_embd": 16,
    "n_layer": 4,
    "n_inner": 32,
    "bos_token_id": END,
    "eos_token_id": END,
}
# All servers here have the same sizes, so that programs are compiled once.
SIZES = (
    *("--max-batch-size", "12", "--max-batch-tokens", str(N_POSITIONS), "--n-slots", "1600"),
    *("--dtype", "float32", "--served-model-name", "small", "--access-log", "off"),
)
_TAKES = re.compile(r"listens for control messages at (\S+)")


def write_model(directory: Path, **other: Any) -> Path:
    """A GPT-2 of four layers with random weights, whose tokens are the ASCII characters and one at the end.

    A text thus has a character for each token, so a lost or doubled token shows.
    """
    config = CONFIG | other
    tensors = gpt2_tensors(config)
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name] *= 0.1  # or the same few tokens would stand in every text
    write_checkpoint(directory, config, tensors)
    characters = {character: byte for character, byte in BYTE_OF_CHARACTER.items() if byte < END}
    tokenizer = tokenizers.Tokenizer(models.BPE(characters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_shape(directory: Path, **other: Any) -> Path:
    """Write only a config.json, for random weights."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", CONFIG | other)
    return directory


class OrcaWorker:
    """`orca worker` in a process of its own, listening on a free port of loopback unless `flags` say else.

    A context manager that ends it; `address` is known when it `listens`.
    """

    def __init__(
        self, model: Path | str, flags: Sequence[str], *, variables: Mapping[str, str] | None = None
    ) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCA_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "worker", str(model), *listen, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._file,
            cwd=ROOT,
            env={**environment, "XLA_FLAGS": xla_flags(), **(variables or {})},
        )

    def stderr(self) -> str:
        """All output on stderr so far."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def listens(self) -> Self:
        """Wait until it reports its address."""
        until(lambda: bool(_TAKES.search(self.stderr())) or self.process.poll() is not None, "a worker")
        assert self.process.poll() is None, self.stderr()
        return self

    @property
    def address(self) -> str:
        """The address at which the worker listens."""
        match = _TAKES.search(self.stderr())
        assert match is not None, self.stderr()
        return match[1]

    def mistake(self) -> str:
        """Wait for its end with status 2; return its last line."""
        assert self.process.wait(SOON) == 2, self.stderr()
        text = self.stderr()
        assert "Traceback" not in text, text
        last = text.splitlines()[-1]
        assert last.startswith("orca: error: "), text
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    status = self.process.wait(20)
                except subprocess.TimeoutExpired:
                    status = None
                if kind is None:
                    assert status == 0, f"after SIGTERM: {status}, {self.stderr()}"
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            self._file.close()


def serve_mistake(flags: Sequence[str], *, seconds: float = SOON) -> str:
    """Run `orca serve` with these flags to its end with status 2 or 1; return its last line."""
    server = ServerProcess(flags)
    try:
        assert server.wait(seconds) in (1, 2), server.stderr()
        text = server.stderr()
        assert "Traceback" not in text, text
        (line,) = [line for line in text.splitlines() if line.startswith("orca: error: ")]
        assert text.splitlines()[-1] == line, text
        return line
    finally:
        server.kill()


def until(condition: Callable[[], bool], what: str, seconds: float = SOON) -> None:
    """Wait for a condition of other processes, by polling."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} seconds for {what}"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextmanager
def nobody_listens() -> Iterator[str]:
    """A loopback address where no process listens, or can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
