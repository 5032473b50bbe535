"""An option defined in this file alone: its one line makes it appear wherever users look.

A separate process imports orca_jax/config.py with the line added.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import contextlib
import inspect
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.workers.worker_options import WorkerOptions
from scripts.site.options import options_page
from server import cli
from server.ray.settings import ray_settings
from server.settings.serve_settings import serve_settings
from tests.places import ROOT

LINE = '    toy_bound: Annotated[int, "maximum number of toys", "limits", Whole(1, 9), Served(4)] = 3'
SECONDS = 120
# Runs this file as a program, in which orca_jax/config.py has the line.
PROGRAM = f"""
import importlib.abc, importlib.machinery, runpy, sys

LINE, BEFORE = {LINE!r} + chr(10), "    max_queue_bytes: Annotated["

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        source = self.get_source(name)
        assert source.count(BEFORE) == 1
        return compile(source.replace(BEFORE, LINE + BEFORE), self.path, "exec")

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "orca_jax.config":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder())
runpy.run_module("tests.whole.commands.test_toy_option", run_name="__main__")
"""


def look(folder: Path) -> dict[str, Any]:
    """The option in each place where it appears, as JSON."""

    def said(*words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            cli.main(words)
        return " ".join(out.getvalue().split())

    def served(*flags: str, **environ: str) -> Any:
        return serve_settings(cli.parser().parse_args(["serve", *flags]), environ)

    def refusal(call: Callable[[], object]) -> str:
        with pytest.raises(Exception) as refused:  # noqa: PT011 (the kinds differ; the words are compared)
            call()
        return f"{refused.type.__name__}: {refused.value}"

    def value(config: Any) -> int:
        return config.toy_bound

    file, wrong_key = folder / "orca.yaml", folder / "wrong.yaml"
    file.write_text("toy_bound: 8\n")
    wrong_key.write_text("toy_bond: 8\n")
    parameter = inspect.signature(LLM).parameters["toy_bound"]
    wrong_name: dict[str, Any] = {"toy_bond": 5}
    five: dict[str, Any] = {"toy_bound": 5}
    seven: dict[str, Any] = {"toy_bound": 7}
    ten: dict[str, Any] = {"toy_bound": 10}
    with LLM(max_batch_size=1, **five) as llm:
        in_the_engine = value(llm.serving)
    sent = WorkerOptions(stage=0, engine=EngineConfig(**seven), listen="a:1").as_json()
    return {
        "LLM's signature": [parameter.kind.name, parameter.default],
        "help(LLM.__init__)": "toy_bound: maximum number of toys" in (LLM.__init__.__doc__ or ""),
        "LLM's wrong name": refusal(lambda: LLM(**wrong_name)),
        "LLM's wrong value": refusal(lambda: LLM(**ten)),
        "the scheduler's configuration": in_the_engine,
        "a worker": value(WorkerOptions.from_json(sent).engine),
        "serve's default": value(served().engine),
        "flag": value(served("--toy-bound", "5").engine),
        "variable": value(served(ORCA_TOY_BOUND="6").engine),
        "file": value(served("--config", str(file)).engine),
        "Ray": value(ray_settings({"toy-bound": "7"}, {})[0].engine),
        "serve --help": said("serve", "--help"),
        "generate --help": said("generate", "--help"),
        "completion": said("completion", "bash"),
        "a wrong flag": said("serve", "--toy-bond", "5"),
        "a wrong value": said("serve", "--toy-bound", "10"),
        "not a number": said("serve", "--toy-bound", "many"),
        "a wrong variable": list(served(ORCA_TOY_BOND="5").notes),
        "a wrong key": said("serve", "--config", str(wrong_key)),
        "Ray's wrong key": refusal(lambda: ray_settings({"toy_bond": 7}, {})),
        "reference page": [line for line in options_page().splitlines() if "toy" in line],
    }


def test_an_option_of_one_line_is_found_everywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    limits = "toy_bound is 10; it must be a whole number from 1 to 9"
    meant = "'toy_bond' is not a setting; did you mean toy_bound?"
    helped, of_generate = (found.pop(f"{name} --help") for name in ("serve", "generate"))
    assert "limits: --max-queue N" in helped
    assert "--toy-bound N maximum number of toys (default: 4)" in helped
    assert "--toy-bound N maximum number of toys (default: 3)" in of_generate
    assert "--toy-bound" in found.pop("completion")
    assert found.pop("a wrong key").endswith(f"line 1: {meant}")
    assert found == {
        "LLM's signature": ["KEYWORD_ONLY", 3],
        "help(LLM.__init__)": True,
        "LLM's wrong name": "TypeError: 'toy_bond' is not an option; did you mean toy_bound?",
        "LLM's wrong value": f"ConfigError: {limits}",
        "the scheduler's configuration": 5,
        "a worker": 7,
        "serve's default": 4,
        "flag": 5,
        "variable": 6,
        "file": 8,
        "Ray": 7,
        "a wrong flag": "orca: error: --toy-bond is not a flag of `orca serve`; did you mean --toy-bound? "
        "(see orca serve --help)",
        "a wrong value": f"orca: error: {limits}",
        "not a number": "orca: error: argument --toy-bound: invalid int value: 'many'; it must be a whole "
        "number (see orca serve --help)",
        "a wrong variable": [
            "the variable 'ORCA_TOY_BOND' is not a setting and has no effect; did you mean ORCA_TOY_BOUND?"
        ],
        "Ray's wrong key": f"UsageError: {meant}",
        "reference page": [
            "| `toy_bound` | a whole number | `3`; of `orca serve` `4` | maximum number of toys | "
            "`LLM`, `serve`, `generate`, `chat`, `compile` |"
        ],
    }


def test_a_type_checker_knows_every_option() -> None:
    """pyright checks the ignore comments too: one without an error is itself an error."""
    with pytest.raises(TypeError, match="'max_batch_sise' is not an option; did you mean max_batch_size"):
        LLM(max_batch_sise=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="max_batch_size is '4'; it must be a whole number"):
        LLM(max_batch_size="4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="reservation is 'half'"):
        LLM("a model", reservation="half")  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
