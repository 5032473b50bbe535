"""Mistakes on the command line of `orca`: their messages, which need no slow import."""

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from orca_jax.model_files.found_model import DEMO_MODEL
from server import cli
from server.commands import serve
from server.commands.completion import script
from server.parser import SHELLS, parser, shown_flags
from tests.places import ROOT

COMMANDS = list(parser().commands)
# Packages that take longer to import than a mistake in a flag should take to be found, and in a path.
SLOW = ("jax", "jaxlib", "flax", "orbax", "tensorstore", "fastapi", "uvicorn")
FOR_FLAGS = (*SLOW, "numpy", "grpc", "tokenizers", "llguidance", "rich", "yaml", "jinja2")


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error that a command ends with."""
    assert cli.main(arguments) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("orca: error: ") and stderr.count("\n") == 1
    return stderr.removeprefix("orca: error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "serve --max-batchsize 3",
            "--max-batchsize is not a flag of `orca serve`; did you mean --max-batch-s",
        ),
        ("serve --max_batch_size 3", "did you mean --max-batch-size?"),
        ("serve --MAX-QUEUE=3", "--MAX-QUEUE is not a flag of `orca serve`; did you mean --max-queue?"),
        ("serve --qqqq", "--qqqq is not a flag of `orca serve` (see orca serve --help)"),
        ("serve -x", "-x is not a flag of `orca serve` (see"),
        (
            "serve --max-tokens 3",
            "--max-tokens is a flag of `orca generate` and `orca chat`, not of `orca se",
        ),
        ("plan --devise h100", "--devise is not a flag of `orca plan`; did you mean --device?"),
        ("worker --stages 1", "--stages is not a flag of `orca worker`; did you mean --stage?"),
        ("convert --form x", "--form is not a flag of `orca convert`"),
        ("serve --max-q 3", "--max-q is not a flag of `orca serve`; did you mean"),  # no abbreviations
        ("--vers", "--vers is not a flag of `orca`; did you mean --version?"),
        ("serv", "there is no command 'serv'; did you mean serve?; it is one of generate, chat, serve,"),
        ("qqq", "there is no command 'qqq'; it is one of generate, chat, serve,"),
        ("serve a b", "unrecognized arguments: b"),
        ("serve a --model b", "the model is given twice; give it once"),
        ("replay", "the following arguments are required: FILE"),
    ],
)
def test_a_mistake_is_explained(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(capsys, *line.split())


@pytest.mark.parametrize("prompt", ["-5", "-.5", "- an item", "-", "--"])
def test_words_that_only_look_like_flags(prompt: str) -> None:
    words = ["generate", *(["--"] if prompt == "--" else []), prompt]
    assert parser().parse_args(words).prompt == [prompt]
    assert parser().parse_args(["generate", "--", "--qqqq"]).prompt == ["--qqqq"]
    assert parser().parse_args(["generate", "--stop=--qqqq", "-n5"]).stop == ["--qqqq"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str) -> None:
    run = parser().commands[name].get_default("run")
    assert callable(pkgutil.resolve_name(run)) and run.startswith("server.commands.")
    assert callable(pkgutil.resolve_name(serve.SERVING))


def started(
    lines: Sequence[Sequence[str]], modules: Sequence[str], folder: Path
) -> list[tuple[int, str, list[str]]]:
    """Run each command line in one new process: its status, and which of `modules` are imported after it."""
    code = (
        "import json, sys; from server.cli import main\n"
        f"for line in {[list(line) for line in lines]!r}:\n"
        "    status = main(line); sys.stderr.flush()\n"
        f"    print(json.dumps([status, sorted({set(modules)!r} & set(sys.modules))]))\n"
    )  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    errors = done.stderr.splitlines()
    assert len(answers) == len(errors) == len(lines), done.stderr
    return [(status, error, names) for (status, names), error in zip(answers, errors, strict=True)]


def test_a_wrong_flag_imports_nothing_slow(tmp_path: Path) -> None:
    lines = [[name, "--qqqq"] for name in COMMANDS] + [["qqqq"], ["serve", "--max-model-len", "9"]]
    lines += [["serve", "--port", "x"], ["serve", "--policy", "x"], ["worker", "--stage", "1"]]
    for line, (status, message, imported) in zip(lines, started(lines, FOR_FLAGS, tmp_path), strict=True):
        assert (status, imported) == (2, []), (line, message)


def test_a_wrong_path_or_setting_imports_no_jax(tmp_path: Path) -> None:
    bad, empty, no_weights = tmp_path / "bad", tmp_path / "empty", tmp_path / "no_weights"
    for folder in (bad, empty, no_weights):
        folder.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    (no_weights / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (bad / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}), encoding="utf-8")
    (tmp_path / "bad.yaml").write_text("port: many\n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    new = str(tmp_path / "new")
    worker = ["--stage", "1", "--of", "2", "--listen", "127.0.0.1:0"]
    lines: list[tuple[list[str], str]] = []
    for place, words in (
        ("/nowhere", "there is no directory"),
        ("empty", "it is empty"),
        ("bad", "unheard_of"),
        ("no_weights/config.json", "is a file"),
        ("org/model", "HF_HUB_OFFLINE is set"),
    ):
        lines += [
            (["serve", place], words),
            (["generate", "a prompt", "--model", place], words),
            (["chat", place], words),
            (["worker", place, *worker], words),
            (["compile", place], words),
            (["plan", place, "--device", "h100"], words),
            (["convert", place, new], words),
        ]
    lines += [
        (["serve", "no_weights"], "the weights are missing"),
        (["generate", "a prompt", "--model", "no_weights"], "the weights are missing"),
        (["worker", "no_weights", *worker], "the weights are missing"),
        (["convert", "no_weights", new], "the weights are missing"),
        (["convert", str(DEMO_MODEL), "bad"], "already exists"),
        (["replay", "/nowhere"], "cannot be read"),
        (["replay", "rows.jsonl"], "is not a recording"),
        (["serve", "--config", "/nowhere.yaml"], "cannot be read"),
        (["serve", "--config", "bad.yaml"], "line 1: port"),
        (["serve", "--api-key-file", "/nowhere"], "cannot be read"),
        (["serve", "--tokenizer", "/nowhere"], "tokenizer is /nowhere"),
        (["serve", "--generation-config", "/nowhere"], "generation_config is /nowhere"),
        (["serve", "--chat-template", "/nowhere"], "/nowhere"),
        (["serve", "--ssl-certfile", "/a.pem", "--ssl-keyfile", "/a.key"], "not a usable certificate"),
        (["serve", "--max-batch-size", "0"], "max_batch_size is 0"),
        (["compile", "--max-batch-size", "0"], "max_batch_size is 0"),
        (["generate", "a prompt", "--max-batch-size", "0"], "max_batch_size is 0"),
        (["generate", "a prompt", "--temperature", "-1"], "temperature is -1"),
        (["generate", "--input", "/nowhere"], "/nowhere"),
        (["plan", "--device", "h1000"], "h1000"),
    ]
    results = started([line for line, _ in lines], SLOW, tmp_path)
    for (line, words), (status, message, imported) in zip(lines, results, strict=True):
        assert (status, imported) == (2, []) and words in message, (line, status, message, imported)


def test_replicas_check_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines that run the replicas have the model; this one need not."""
    handed: list[str] = []
    monkeypatch.setattr(serve, "run_replicas", lambda args: handed.append(args.model) or sys.exit(0))
    assert cli.main(["serve", "/nowhere", "--replicas", "2"]) == 0
    assert handed == ["/nowhere"]


# Shell completion


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_flag(shell: str) -> None:
    text = script(shell)
    for name, command in parser().commands.items():
        assert name in text
        missing = {flag for flag in shown_flags(command) if flag.removeprefix("--") not in text}
        assert not missing, name
    assert "tensor-parallel-size" not in text  # what other engines call it


@pytest.mark.parametrize("shell", [each for each in SHELLS if shutil.which(each)])
def test_the_shell_reads_its_script(shell: str, tmp_path: Path) -> None:
    (tmp_path / "orca").write_text(script(shell), encoding="utf-8")
    done = subprocess.run([shell, "-n", "orca"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def completed(*words: str, folder: Path) -> list[str]:
    """Completions that bash offers for the last word."""
    code = (
        f"source {folder}/orca.bash; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
        '_shtab_orca; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "orca.bash").write_text(script("bash"), encoding="utf-8")
    (tmp_path / "a model").mkdir()
    (tmp_path / "amodel").mkdir()
    assert completed("orca", "ser", folder=tmp_path) == ["serve"]
    assert completed("orca", "serve", "--max-batch-s", folder=tmp_path) == ["--max-batch-size"]
    assert completed("orca", "serve", "--policy", "", folder=tmp_path) == ["default", "orca"]
    assert completed("orca", "serve", "am", folder=tmp_path) == ["amodel"]
    assert completed("orca", "completion", "", folder=tmp_path) == list(SHELLS)
