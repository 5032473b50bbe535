"""Codex: a turn in which it runs a command, and another that resumes the conversation."""

import json
import shlex
from pathlib import Path
from typing import Any

from tests.clients import npm_programs
from tests.clients.page import block


def codex(url: str, folder: Path, home: Path, *resumed: str) -> list[dict[str, Any]]:
    """The items of a run as docs/clients.md has it."""
    settings = home / "config.toml"
    settings.write_text(block("Codex", "toml", url))
    _, verb, prompt = shlex.split(block("Codex", "sh", url))
    # Its sandbox needs what a container may forbid, and the folder is the test's own.
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    command = [npm_programs.program("codex"), verb, *resumed, *flags, prompt]
    done = npm_programs.run(command, folder, home, {"CODEX_HOME": str(home)})
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["type"] == "turn.completed", done.stdout
    return [event["item"] for event in events if event["type"] == "item.completed"]


def test_it_runs_a_command_and_answers(errands: str, tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "note.txt").write_text("Tomorrow: squall\n")
    items = codex(errands, folder, home)
    (execution,) = (item for item in items if item["type"] == "command_execution")
    assert "cat note.txt" in execution["command"] and execution["exit_code"] == 0
    assert execution["aggregated_output"] == "Tomorrow: squall\n"
    assert (items[-1]["type"], items[-1]["text"]) == ("agent_message", "It says squall, as you asked.")

    items = codex(errands, folder, home, "resume", "--last")
    messages = [item["text"] for item in items if item["type"] == "agent_message"]
    assert messages == ["It says squall, as you asked."]
    assert not [item for item in items if item["type"] == "command_execution"]  # the result is in the prompt
