"""`orca generate --input --output`, killed at any point, continues to the file of an undisturbed run."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from orca_jax import LLM, SamplingParams
from server import cli
from server.commands import answer_file, jsonl
from server.errors import UsageError
from tests.places import ROOT
from tests.whole.lent import Lent

SOON = 300  # seconds that nothing here takes
# Greedy and seeded lines, several outputs, errors, blank lines.
LINES = [
    '{"prompt": "ab", "temperature": 0}',
    '{"prompt": "ab", "seed": 5}',
    "not json",
    "",
    '{"prompt": "one", "n": 3, "seed": 8, "max_tokens": 3}',
    '{"prompt": "ab", "temperature": 0, "logprobs": 0, "max_tokens": 70}',
    '{"prompt": [1, 2, 3], "temperature": 0}',
    '{"prompt": "w\\u00f6rter", "seed": 1, "stop": ["q"]}',
    *(f'{{"prompt": "{i}", "seed": {i}}}' for i in range(6)),
]
FLAGS = SamplingParams(max_tokens=6, ignore_eos=True)


class Killed(BaseException):
    """Stands for SIGKILL in a process that must survive."""


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run(llm: LLM, source: Path, sink: Path, *, overwrite: bool = False, **options: Any) -> int:
    options = {"model": "a" * 16, "defaults": FLAGS, **options}
    quiet = Console(file=io.StringIO())
    with jsonl.open_files(str(source), str(sink), overwrite=overwrite) as (lines, answers):
        return jsonl.run(llm, lines, answers, console=quiet, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("input") / "in.jsonl", LINES)


@pytest.fixture(scope="module")
def undisturbed(tiny: LLM, source: Path) -> bytes:
    sink = source.parent / "undisturbed.jsonl"
    assert run(tiny, source, sink) == 1
    data = sink.read_bytes()
    assert [json.loads(line)["line"] for line in data.splitlines()] == [1, 2, 3, *range(5, 15)]
    return data


@settings(max_examples=25)
@given(kills=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 300)), min_size=1, max_size=3))
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    tiny: LLM, source: Path, undisturbed: bytes, kills: list[tuple[int, int]]
) -> None:
    """Each kill comes at the n-th record of its run, after this many of its bytes are written."""
    sink = source.parent / "killed.jsonl"
    sink.unlink(missing_ok=True)
    write_all = answer_file.write_all
    for n_records, n_bytes in kills:
        n_left = n_records

        def dying(file: Any, record: bytes, n_bytes: int = n_bytes) -> None:
            nonlocal n_left
            if n_left == 0:
                write_all(file, record[:n_bytes])
                raise Killed
            n_left -= 1
            write_all(file, record)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answer_file, "write_all", dying)
            try:
                assert run(tiny, source, sink) == 1
            except Killed:
                assert undisturbed.startswith(sink.read_bytes())
    assert run(tiny, source, sink) == 1
    assert sink.read_bytes() == undisturbed


def submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The prompts that reach the service from now on."""
    prompts: list[tuple[int, ...]] = []
    submit = llm.service.submit

    def listening(prompt: Any, *arguments: Any, **options: Any) -> Any:
        prompts.append(tuple(prompt.token_ids))
        return submit(prompt, *arguments, **options)

    monkeypatch.setattr(llm.service, "submit", listening)
    return prompts


def test_a_complete_file_runs_nothing(
    tiny: LLM, source: Path, undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = tmp_path / "out.jsonl"
    sink.write_bytes(undisturbed)
    prompts = submitted(tiny, monkeypatch)
    assert run(tiny, source, sink) == 1, "it still has errors"
    assert prompts == []
    assert sink.read_bytes() == undisturbed


def test_only_what_is_missing_runs(
    tiny: LLM, source: Path, undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = tmp_path / "out.jsonl"
    sink.write_bytes(b"".join(undisturbed.splitlines(keepends=True)[:-2]))
    prompts = submitted(tiny, monkeypatch)
    assert run(tiny, source, sink) == 1
    assert prompts == [(ord("4"),), (ord("5"),)]
    assert sink.read_bytes() == undisturbed


def change(i: int, line: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [*lines[:i], line, *lines[i + 1 :]]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (change(0, '{"prompt": "ac", "temperature": 0}'), {}, "answer to line 1, but to another request"),
        (change(1, '{"prompt": "ab", "seed": 6}'), {}, "answer to line 2, but to another request"),
        (change(13, "{}"), {}, "answer to line 14, but to another request"),
        (lambda lines: lines[:-2], {}, "answers to 2 lines that the input does not have"),
        (change(8, ""), {}, "answers to 1 lines that the input does not have"),
        (lambda lines: lines[1:], {}, "answer to line 1, but to another request"),
        (list, {"defaults": SamplingParams(max_tokens=6)}, "answer to line 1, but to another request"),
        (list, {"model": "b" * 16}, "has answers of another model"),
    ],
)
def test_an_answer_to_something_else_is_refused(
    lines: Callable[[list[str]], list[str]],
    options: dict[str, Any],
    message: str,
    tiny: LLM,
    undisturbed: bytes,
    tmp_path: Path,
) -> None:
    changed, sink = write_lines(tmp_path / "in.jsonl", lines(LINES)), tmp_path / "out.jsonl"
    sink.write_bytes(undisturbed)
    early = {"model": "a" * 16, "defaults": FLAGS, **options}
    with (
        jsonl.open_files(str(changed), str(sink)) as (source, answers),
        pytest.raises(UsageError, match=message),
    ):
        jsonl.check_answers(source, answers, **early)
    with pytest.raises(UsageError, match=message) as caught:
        run(tiny, changed, sink, **options)
    assert str(sink) in str(caught.value) and "--overwrite" in str(caught.value)
    assert sink.read_bytes() == undisturbed
    run(tiny, changed, sink, overwrite=True, **options)
    assert sink.read_bytes() != undisturbed


def test_errors_stay_unless_they_are_to_be_run_again_or_their_line_is_mended(
    tiny: LLM, undisturbed: bytes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = tmp_path / "out.jsonl"
    sink.write_bytes(undisturbed)
    errors = [record for record in map(json.loads, undisturbed.splitlines()) if "error" in record]
    assert [record["line"] for record in errors] == [3, 6]

    ran: list[int] = []
    start = jsonl._Starter.start

    def listening(starter: Any, request: jsonl.Request) -> jsonl.Job:
        ran.append(request.line.number)
        return start(starter, request)

    monkeypatch.setattr(jsonl._Starter, "start", listening)
    assert run(tiny, source, sink) == 1
    assert ran == []
    assert run(tiny, source, sink, retry_errors=True) == 1
    assert ran == [3, 6]
    assert sink.read_bytes() == undisturbed, "the same errors, in order"

    mended = write_lines(tmp_path / "in.jsonl", change(2, '{"prompt": "ab", "temperature": 0}')(LINES))
    ran.clear()
    with pytest.MonkeyPatch.context() as patch:

        def kill(*_: object) -> None:
            raise Killed

        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            run(tiny, mended, sink)
    assert ran == [3]
    assert run(tiny, mended, sink) == 1
    assert ran == [3], "its answer was kept"
    fresh = tmp_path / "fresh.jsonl"
    assert run(tiny, mended, fresh) == 1
    assert sink.read_bytes() == fresh.read_bytes()
    assert json.loads(sink.read_bytes().splitlines()[2])["finish_reason"] == "length"


def test_a_grammar_without_room_waits_for_the_lines_before_it(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", ['{"prompt": "a"}', '{"prompt": "b"}'])
    stream = tiny.stream
    n_refused = 0

    def full(prompt: Any, *arguments: Any) -> Any:
        nonlocal n_refused
        if prompt == "b" and n_refused == 0:
            n_refused += 1
            raise jsonl.QueueFull("no room")
        return stream(prompt, *arguments)

    monkeypatch.setattr(tiny, "stream", full)
    assert run(tiny, source, tmp_path / "out.jsonl") == 0
    assert n_refused == 1


# For real

_PROGRAM = """
import os, signal, sys
from server import cli
from server.commands import answer_file

n_left, write_all = int(sys.argv.pop(1)), answer_file.write_all

def dying(file, record):
    global n_left
    if n_left == 0:
        write_all(file, record[: len(record) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    n_left -= 1
    write_all(file, record)

answer_file.write_all = dying
sys.exit(cli.main(sys.argv[1:]))
"""


def test_the_command_after_sigkill(
    tiny_directory: Path,
    source: Path,
    tmp_path: Path,
    lent: Lent,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    sink, wanted = tmp_path / "out.jsonl", tmp_path / "wanted.jsonl"

    def command(sink: Path, *flags: str) -> list[str]:
        where = ["--input", str(source), "--output", str(sink), "--model", str(tiny_directory)]
        return ["generate", *where, "--max-tokens", "6", "--seed", "3", "--ignore-eos", *flags]

    killed = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "5", *command(sink)],
        env=environment,
        capture_output=True,
        timeout=SOON,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert cli.main(command(wanted)) == 1
    torn = sink.read_bytes()
    assert torn.count(b"\n") == 5 and not torn.endswith(b"\n")
    assert wanted.read_bytes().startswith(torn)
    assert cli.main(command(sink)) == 1
    assert sink.read_bytes() == wanted.read_bytes()
    monkeypatch.setattr("server.commands.generating.load", None)
    assert cli.main(command(sink, "--temperature", "0.3")) == 2
    assert "answer to line 2, but to another request" in capsys.readouterr().err
    assert cli.main(command(sink, "--dtype", "float32")) == 2
    assert "has answers of another model" in capsys.readouterr().err
    assert sink.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--overwrite"], "--overwrite is about the file of --output"),
        (["--input", "x", "--retry-errors"], "--retry-errors is about the file of --output"),
        (["--input", "x", "--output", "-", "--overwrite"], "--overwrite is about the file of --output"),
        (["--input", "x", "--output", "y", "--overwrite", "--retry-errors"], "--overwrite runs every line"),
    ],
)
def test_flags_without_a_file(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *([] if "--input" in flags else ["prompt"]), *flags]) == 2
    assert message in capsys.readouterr().err


def test_another_file_is_refused_before_the_model_is_loaded(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.commands.generating.load", None)
    sink = tmp_path / "out.jsonl"
    sink.write_text("my thesis\n")
    assert cli.main(["generate", "--input", str(source), "--output", str(sink)]) == 2
    assert "line 1 is not an answer that orca generate --output wrote" in capsys.readouterr().err
    assert sink.read_text() == "my thesis\n"
