"""Claude Code: a turn in which it runs a command, and another that continues the conversation."""

import json
import shlex
from pathlib import Path
from typing import Any

from tests.clients import npm_programs
from tests.clients.page import block


def claude(url: str, folder: Path, home: Path, *flags: str) -> list[dict[str, Any]]:
    """The events of a run as docs/clients.md has it, in JSON."""
    *exports, command = block("Claude Code", "sh", url).splitlines()
    variables = dict(shlex.split(line, comments=True)[1].split("=", 1) for line in exports)
    _, *words = shlex.split(command)
    program = npm_programs.program("claude")
    shown = ("--output-format", "stream-json", "--verbose")
    done = npm_programs.run([program, *words, *shown, *flags], folder, home, variables)
    return [json.loads(line) for line in done.stdout.splitlines()]


def blocks_of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    contents = [event["message"]["content"] for event in events if event["type"] in ("assistant", "user")]
    return [part for content in contents for part in content if part["type"] == kind]


def test_it_runs_a_command_and_answers(errands: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text("Tomorrow: sleet\n")
    events = claude(errands, folder, tmp_path / "home")
    (use,) = blocks_of(events, "tool_use")
    (result,) = blocks_of(events, "tool_result")
    assert (use["name"], use["input"]["command"]) == ("Bash", "cat note.txt")
    assert result["content"] == "Tomorrow: sleet" and result["tool_use_id"] == use["id"]
    end = events[-1]
    assert (end["result"], end["is_error"], end["num_turns"]) == ("It says sleet, as you asked.", False, 2)
    # Almost all of the second prompt was cached, and the counts have come through.
    usage = end["usage"]
    assert usage["cache_read_input_tokens"] > 30_000 > usage["output_tokens"] > 30

    events = claude(errands, folder, tmp_path / "home", "--continue")
    assert not blocks_of(events, "tool_use")  # the result is still in the prompt
    assert events[-1]["result"] == "It says sleet, as you asked."
