"""The tutorial about policies: its code and its comparison run as printed."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

from bench.policies import __main__ as policies
from tests.documents import Block, blocks
from tests.places import ROOT

PAGE = "docs/tutorials/write-a-policy.md"


def printed(language: str) -> list[Block]:
    """The page's blocks in a language."""
    return [block for block in blocks(language) if block.document == PAGE]


def test_the_tutorial_s_policies_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, more, simulation = printed("python")
    (tmp_path / "shortest_first.py").write_text(policy.text)
    (tmp_path / "shortest_work.py").write_text(more.text)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(simulation.text, PAGE, "exec"), {})
    assert said.getvalue() == "['short', 'long']\n"

    (command,) = printed("sh")[0].commands()
    assert command[:3] == ["python", "-m", "bench.policies"]
    monkeypatch.setattr(sys, "argv", [*command[2:], "--policy", "shortest_work:ShortestWork"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        policies.main()
    rows = {row["policy"]: row for row in json.loads(said.getvalue().splitlines()[-1])["rows"]}
    assert all(row["n_requests"] == 100 for row in rows.values())
    default, by_output, by_work = (row["latency_mean"] for row in rows.values())
    # As the page says, in seconds; the simulation is the same everywhere.
    assert [round(each, 3) for each in (default, by_output, by_work)] == [0.485, 0.512, 0.318]
