"""`orca generate`: text to the terminal, a file to a file, and every mistake in one line."""

import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import orca_jax
from orca_jax import LLM, SamplingParams
from orca_jax.errors import EngineError
from server import cli, jsonl
from server.flags import ENGINE_FLAGS

ROOT = Path(__file__).resolve().parents[2]
SOON = 300  # seconds that nothing here takes


class Lent:
    """The shared LLM for one command, which would close its own."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __enter__(self) -> "Lent":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def lent(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """Let `orca generate` run the shared tiny model."""
    lent = Lent(tiny)
    monkeypatch.setattr(orca_jax, "LLM", lambda **_: lent, raising=False)
    return lent


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The command line


def test_the_flags_are_those_of_the_dataclasses() -> None:
    parameters = inspect.signature(LLM).parameters
    for flag in ENGINE_FLAGS:
        assert parameters[flag.name].default == flag.default, flag.name
    args = cli.parser().parse_args(["generate", "x"])
    for field in fields(SamplingParams):
        assert hasattr(args, field.name)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"orca {orca_jax.__version__}\n"
    assert cli.main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in (*(flag.name for flag in ENGINE_FLAGS), *(field.name for field in fields(SamplingParams))):
        assert "--" + flag.replace("_", "-") in out
    assert "(default: 128)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["swim"], "invalid choice: 'swim'"),
        (["generate", "--no-such-flag", "x"], "unrecognized arguments: --no-such-flag"),
        (["generate", "x", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0; it must be a whole number from 1"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan; it must be a number from 0 to 100"),
        (["generate", "x", "--stop", ""], "each stop string must have 1 to 1024 characters"),
        (["generate", "x", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["generate", "x", "--tensor-parallel", "8"], "n_heads 4 is no multiple of it; 1, 2, 4 split"),
        (["generate", "x", "--model", "/no/such/place"], "there is no directory /no/such/place"),
        (["generate"], "give a PROMPT, '-' to read one from stdin, or --input FILE.jsonl"),
        (["generate", "-", "-"], "it can stand there only once"),
        (["generate", "x", "--input", "in.jsonl"], "give either PROMPTs or --input, not both"),
        (["generate", "x", "--output", "out.jsonl"], "--output needs --input"),
        (["generate", "--input", "/no/such/file"], "cannot open /no/such/file: No such file or directory"),
        (["generate", "--input", "/"], "cannot open /: Is a directory"),
        (["generate", "--input", "/dev/null", "--output", "/no/such/file"], "cannot open /no/such/file"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith("orca: error: ")
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


# Text


def test_text_goes_to_stdout_and_notes_to_stderr(
    lent: Lent, tiny: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "ab", "cd", "--max-tokens", "9", "--seed", "5", "--ignore-eos"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr()
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, ignore_eos=True)
    first, second = tiny.generate(["ab", "cd"], params)
    assert told.out == f"{first.text}\n\n{second.text}\n"
    assert "[1 of 2]" in told.err
    assert "[2 of 2]" in told.err
    assert told.err.count("2 + 9 tokens") == 2
    assert told.err.count("finish reason length, seed 5") == 2


def test_a_terminal_shows_the_prompt_and_obeys_nothing(
    lent: Lent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    assert (
        cli.main(["generate", "ab\x1b[2J", "--temperature", "50", "--ignore-eos", "--max-tokens", "40"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2mab\ufffd[2J\x1b[0m")
    assert "\x1b" not in out.removeprefix("\x1b[2mab\ufffd[2J\x1b[0m")


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_prompt_from_stdin(
    arguments: list[str],
    lent: Lent,
    tiny: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("zwölf\n".encode()))
    assert cli.main(["generate", *arguments, "--max-tokens", "5", "--temperature", "0"]) == 0
    (expected,) = tiny.generate("zwölf", SamplingParams(max_tokens=5, temperature=0.0))
    assert capsys.readouterr().out == f"{expected.text}\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "stdin is not UTF-8"),
        (b"\n", "no token"),
        (b"x" * 64, "at most 63"),
        (b"x" * (1 << 25), "stdin has more"),
    ],
)
def test_a_bad_prompt_from_stdin(
    data: bytes,
    message: str,
    lent: Lent,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert cli.main(["generate"]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_frees_the_slots(
    lent: Lent, tiny: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.generate._show", interrupt)
    assert cli.main(["generate", "ab", "--max-tokens", "60", "--ignore-eos"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    tiny.generate([1], SamplingParams(max_tokens=2))
    assert tiny.service.scheduler.n_rsrv == 0


def test_a_terminal_shows_how_much_of_the_checkpoint_is_read(
    tiny: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*, on_load: Callable[[int, int], None], **_: object) -> Lent:
        for done in (1_000, 2_000_000):
            on_load(done, 4_000_000)
        return Lent(tiny)

    monkeypatch.setattr(orca_jax, "LLM", load, raising=False)
    arguments = ["generate", "ab", "--max-tokens", "1"]
    assert cli.main(arguments) == 0
    assert "Loading" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    assert cli.main(arguments) == 0
    told = capsys.readouterr()
    assert "Loading the model" in told.err
    assert "2.0/4.0 MB" in told.err
    assert "Loading" not in told.out


# Files


BAD_LINES: list[tuple[bytes, str, str | None, str]] = [
    (b"not json", "BadLine", "line", "not JSON"),
    (b'{"prompt": "a"', "BadLine", "line", "not JSON"),
    (b'{"prompt": "\xff"}', "BadLine", "line", "not UTF-8"),
    (b'["a"]', "BadLine", "line", "holds list, not an object"),
    (b"null", "BadLine", "line", "holds NoneType"),
    (b'{"prompt": "a", "prompt": "b"}', "BadLine", "line", "a key stands there twice"),
    (b'{"prompt": "a", "temperature": NaN}', "BadLine", "line", "NaN is no JSON value"),
    (b"[" * 100_000, "BadLine", "line", "nested too deep"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "BadLine", "line", "not JSON"),
    (b"{}", "BadLine", "prompt", "there is no prompt"),
    (b'{"prompt": "a", "max_token": 3}', "BadLine", "max_token", "unknown field 'max_token'"),
    (b'{"prompt": ""}', "EmptyPrompt", "prompt", "no token"),
    (b'{"prompt": []}', "EmptyPrompt", "prompt", "no token"),
    (b'{"prompt": 5}', "InvalidPrompt", "prompt", "not int"),
    (b'{"prompt": {"a": 1}}', "InvalidPrompt", "prompt", "not dict"),
    (b'{"prompt": [1, null]}', "InvalidPrompt", "prompt", "element 1"),
    (b'{"prompt": ["a", "b"]}', "InvalidPrompt", "prompt", "element 0"),
    (b'{"prompt": "\\ud800"}', "InvalidPrompt", "prompt", "lone surrogate"),
    (b'{"prompt": [260]}', "TokenOutOfRange", "prompt", "260"),
    (b'{"prompt": "' + b"x" * 64 + b'"}', "PromptTooLong", "prompt", "at most 63"),
    (b'{"prompt": "a", "max_tokens": 64}', "RequestTooLarge", "max_tokens", "at most 63"),
    (b'{"prompt": "a", "max_tokens": "9"}', "InvalidSamplingParameter", "max_tokens", "'9'"),
    (b'{"prompt": "a", "temperature": 1e999}', "InvalidSamplingParameter", "temperature", "inf"),
    (b'{"prompt": "a", "stop": [1]}', "InvalidSamplingParameter", "stop", "each stop string"),
    (b'{"prompt": "a", "ignore_eos": 1}', "InvalidSamplingParameter", "ignore_eos", "true or false"),
    (b"x" * (jsonl.MAX_LINE_BYTES * 3), "BadLine", "line", "more than"),
]


def test_a_file_with_every_kind_of_bad_line(
    lent: Lent, tiny: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = b'{"prompt": "ab", "max_tokens": 3, "temperature": 0, "ignore_eos": true}'
    lines = [b"\xef\xbb\xbf" + good]
    for line, *_ in BAD_LINES:
        lines += [line, b"  ", good]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))  # the last line has no newline
    sink.write_text("what was there before, and is longer\n" * 1000)
    assert cli.main(["generate", "--input", str(source), "--output", str(sink)]) == 1
    first, *rest = records(sink)
    (expected,) = tiny.generate("ab", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    wanted = {
        "prompt": "ab",
        "text": expected.text,
        "token_ids": expected.token_ids,
        "finish_reason": "length",
        "n_input": 2,
    }
    assert first.items() >= wanted.items()
    assert [record["line"] for record in (first, *rest)] == [
        1,
        *(3 * i + k for i in range(len(BAD_LINES)) for k in (2, 4)),
    ]
    for (line, kind, param, message), bad, after in zip(BAD_LINES, rest[::2], rest[1::2], strict=True):
        assert (bad["error"]["type"], bad["error"]["param"]) == (kind, param), line[:80]
        assert message in bad["error"]["message"]
        assert "text" not in bad
        assert after.items() >= wanted.items()
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{2 * len(BAD_LINES) + 1} lines, {len(BAD_LINES)} with errors" in told.err


def test_flags_are_the_lines_defaults(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "a"}, {"prompt": [97], "max_tokens": 2, "seed": 8}, {"prompt": "naïve ☃"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--max-tokens", "4", "--seed", "7", "--ignore-eos", "--temperature", "2"]
    assert cli.main(["generate", "--input", str(source), *arguments]) == 0
    out = capsys.readouterr().out
    one, two, three = map(json.loads, out.splitlines())
    assert (len(one["token_ids"]), one["seed"]) == (4, 7)
    assert (len(two["token_ids"]), two["seed"], two["prompt"]) == (2, 8, [97])
    assert three["prompt"] == "naïve ☃"
    assert "naïve ☃" in out, "text is written as text"


def test_an_empty_file(lent: Lent, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    assert (
        cli.main(["generate", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]) == 0
    )
    assert (tmp_path / "out").read_bytes() == b""


def test_the_output_must_not_be_the_input(
    lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link"
    source.write_text('{"prompt": "a"}\n')
    link.hardlink_to(source)
    for sink in (source, link):
        assert cli.main(["generate", "--input", str(source), "--output", str(sink)]) == 2
        assert "--output is the same file as --input" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "a"}\n'


def test_a_full_disk_is_told(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n' * 9)
    assert cli.main(["generate", "--input", str(tmp_path / "in.jsonl"), "--output", "/dev/full"]) == 2
    assert "cannot write the output: No space left on device" in capsys.readouterr().err


def test_a_long_file_is_read_only_as_far_as_it_is_needed(tiny: LLM) -> None:
    n_read = n_written = furthest = 0

    class Source(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            nonlocal n_read
            n_read += 1
            return b'{"prompt": "a", "max_tokens": 1}\n' if n_read <= 100 else b""

    class Sink(io.BytesIO):
        def write(self, data: Any, /) -> int:
            nonlocal n_written, furthest
            furthest = max(furthest, n_read - n_written)
            n_written += 1
            return super().write(data)

    sink = Sink()
    assert jsonl.run(tiny, Source(), sink, SamplingParams(), Console(file=io.StringIO())) == 0
    assert furthest == 4 * tiny.serving.max_batch_size
    assert [json.loads(line)["line"] for line in sink.getvalue().splitlines()] == list(range(1, 101))


def test_when_the_engine_fails_what_was_in_flight_has_its_records(tiny_directory: Path) -> None:
    with LLM(tiny_directory, max_batch_size=2) as llm:

        def lost(*_: object) -> None:
            raise MemoryError("gone")

        llm.service.scheduler.engine._worker.issue = lost  # pyright: ignore[reportAttributeAccessIssue]
        sink = io.BytesIO()
        source = io.BytesIO(b'{"prompt": "a"}\n' * 1000)
        with pytest.raises(EngineError, match="the lines from there on were not run"):
            jsonl.run(llm, source, sink, SamplingParams(), Console(file=io.StringIO()))
    written = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert 1 <= len(written) <= 9
    assert {record["error"]["type"] for record in written} == {"EngineError"}
    assert [record["line"] for record in written] == list(range(1, len(written) + 1))


# For real


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def test_as_a_program_of_its_own(tiny_directory: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "server.cli", "generate", "--model", str(tiny_directory)]
    done = subprocess.run(
        [*command, "--max-tokens", "8", "--ignore-eos"],
        input=b"a prompt",
        capture_output=True,
        timeout=SOON,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    notes = done.stderr.decode()
    assert len(notes.splitlines()) == 2, f"the notes and nothing else: {notes}"
    assert "8 + 8 tokens" in notes


def test_a_reader_that_leaves(tiny_directory: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n' * 2000)
    command = [sys.executable, "-m", "server.cli", "generate", "--model", str(tiny_directory)]
    with subprocess.Popen(
        [*command, "--input", str(tmp_path / "in.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b'"line": 1' in process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(SOON) == 1
    assert b"Traceback" not in told
    assert b"Broken" not in told
