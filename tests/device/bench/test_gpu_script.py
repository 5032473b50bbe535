"""bench/gpu.sh without a GPU: its commands exist, accept their arguments, and need few libraries."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

SCRIPT = ROOT / "bench" / "gpu.sh"
PART_SECONDS = 590  # of ten minutes
# What an image with JAX for GPUs may lack, or have too old.
LACKING = (
    *("fastapi", "google.protobuf", "grpc", "grpc_health", "httptools", "huggingface_hub", "jinja2"),
    *("llguidance", "matplotlib", "prometheus_client", "pydantic", "starlette", "tokenizers", "uvicorn"),
)
# Started by those that the script names; their libraries, where they have any, are asked for first.
STARTED = (
    "bench.device.start_engine",
    "bench.peers.orca_engine",
    "bench.kernel.run",
    "bench.kernel.torch_attention",
)


@dataclass(frozen=True)
class Line:
    """A measurement: its part, its name, its limit in seconds, and what runs."""

    part: str
    name: str
    seconds: int
    module: str
    arguments: tuple[str, ...]


def listed(*flags: str) -> list[Line]:
    done = subprocess.run(
        ["sh", str(SCRIPT), *flags, "--list"],
        env={**os.environ, "PYTHON": sys.executable, "VLLM": "python"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    return [Line(part, name, int(s), module, tuple(rest)) for part, name, s, module, *rest in words]


EVERY = [*listed(), *listed("--cpu")]


class Parsed(Exception):
    """Raised when a command's parser has accepted its arguments."""


def test_each_part_is_a_command_of_under_ten_minutes() -> None:
    lines = listed()
    parts = list(dict.fromkeys(line.part for line in lines))
    usage = re.findall(r"^#     (\w+)  ", SCRIPT.read_text(), re.MULTILINE)
    assert [part for part in parts if part in usage] == usage  # listed in the order in which they run
    assert {*parts} - {*usage} == {"big_no_graphs", "big_no_triton", "big_skip_temp"}
    for part in parts:
        assert sum(line.seconds for line in lines if line.part == part) <= PART_SECONDS, part
    assert list(dict.fromkeys(line.part for line in listed("--cpu"))) == parts


def test_what_a_benchmark_gives_itself_ends_before_its_limit() -> None:
    given = [line for line in listed() if "--seconds" in line.arguments and line.module == "bench.kernel"]
    assert given
    for line in given:
        own = int(line.arguments[line.arguments.index("--seconds") + 1])
        assert own + 30 <= line.seconds, line


@pytest.mark.parametrize("line", EVERY, ids=lambda line: f"{line.name}-{line.seconds}")
def test_its_arguments_are_taken(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    parse: Any = argparse.ArgumentParser.parse_args

    def taken(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> None:
        parse(parser, words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", taken)
    monkeypatch.setattr(sys, "argv", [line.module, *line.arguments])
    name = f"{line.module}.__main__" if (ROOT / line.module.replace(".", "/")).is_dir() else line.module
    module = importlib.import_module(name)
    if line.module == "bench.versions":
        assert not line.arguments
        return
    with pytest.raises(Parsed):
        module.main()


def test_nothing_that_an_image_may_lack_is_imported() -> None:
    modules = {f"{one.module}.__main__" if one.module == "bench.kernel" else one.module for one in EVERY}
    script = f"""
import importlib, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {LACKING!r}):
            raise ImportError("lacking " + name)
sys.meta_path.insert(0, Lacking())
for name in {sorted({*modules, *STARTED})!r}:
    importlib.import_module(name)
try:
    import llguidance
except ImportError as error:
    assert "lacking" in str(error)
else:
    raise AssertionError("the blocker blocks nothing")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_failed_measurement_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    fake = tmp_path / "python"  # fails for one module alone
    fake.write_text('#!/bin/sh\n[ "$2" = bench.deterministic ] && { echo why >&2; exit 3; }\necho "ran $2"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPT), "--cpu", str(tmp_path / "out"), "small", "start"],
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    ran = re.findall(r"^ran (\S+)", done.stdout, re.MULTILINE)
    assert ran == ["bench.sampler", "bench.stages", "bench.start"]
    assert "deterministic ended with status 3" in done.stdout and "why" in done.stdout
    assert done.stdout.rstrip().endswith("== failed: deterministic")
    assert (tmp_path / "out" / "sampler.txt").read_text() == "ran bench.sampler\n"
    unknown = subprocess.run(["sh", str(SCRIPT), str(tmp_path), "nothing"], capture_output=True, check=False)
    assert unknown.returncode == 2 and b"no part" in unknown.stderr
