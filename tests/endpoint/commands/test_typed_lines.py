"""Messages from stdin: one per line, continued lines, quoted lines, at a terminal and through a pipe."""

import builtins
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import InvalidPrompt
from server.commands import talking
from server.commands.talking import Typed, TypedLines


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def read_all(lines: TypedLines) -> list[Typed]:
    return list(iter(lines.read, None))


MESSAGES: list[tuple[str, list[Typed]]] = [
    ("", []),
    ("one\ntwo", [Typed("one"), Typed("two")]),
    ("one\r\n\n/help\n", [Typed("one"), Typed(""), Typed("/help")]),
    ("one\\\ntwo\\\n\\\nfour\nfive\n", [Typed("one\ntwo\n\nfour"), Typed("five")]),
    ("one\\", [Typed("one")]),
    ('"""one\ntwo"""\nthree\n', [Typed("one\ntwo", is_quoted=True), Typed("three")]),
    ('"""\n  one\\\n\n/two\n"""  \nthree\n', [Typed("  one\\\n\n/two", is_quoted=True), Typed("three")]),
    ('"""/one"""\n', [Typed("/one", is_quoted=True)]),
    ('"""one\ntwo', [Typed("one\ntwo", is_quoted=True)]),
    ('a """ b\n', [Typed('a """ b')]),
]


@pytest.mark.parametrize(("text", "messages"), MESSAGES)
def test_messages_through_a_pipe(
    text: str, messages: list[Typed], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(text.encode()))
    with TypedLines() as lines:
        assert not lines.is_terminal
        assert read_all(lines) == messages
    assert capsys.readouterr() == ("", ""), "no prompts"


def typing(lines: list[str]) -> Callable[..., str]:
    left: Iterator[str] = iter(lines)

    def type_one(_prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return type_one


@pytest.mark.parametrize(("text", "messages"), MESSAGES)
def test_the_same_messages_at_a_terminal(
    text: str, messages: list[Typed], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    monkeypatch.setattr(builtins, "input", typing(text.splitlines()))
    with TypedLines() as lines:
        assert read_all(lines) == messages
    out, err = capsys.readouterr()
    assert out == "", "stdout is not the terminal here: it is for the replies"
    assert err.startswith(">>> ")


@pytest.mark.parametrize(
    ("data", "message"), [(b"\xff\n", "not UTF-8"), (b"x" * ((1 << 24) + 2), "more than")]
)
def test_bytes_that_are_not_a_message(data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    with pytest.raises(InvalidPrompt, match=message):
        TypedLines().read()


class Readline:
    """The module, without a terminal."""

    __doc__ = "GNU readline"

    def __init__(self) -> None:
        self.completer: Any = None
        self.lines: list[str] = []

    def set_completer(self, completer: Any) -> None:
        self.completer = completer

    def set_completer_delims(self, _: str) -> None:
        pass

    def parse_and_bind(self, _: str) -> None:
        pass

    def set_history_length(self, _: int) -> None:
        pass

    def read_history_file(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()

    def write_history_file(self, path: Path) -> None:
        path.write_text("".join(line + "\n" for line in self.lines))


def test_history_is_kept_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    history = tmp_path / "state" / "chat_history"
    for typed in ("one", "two"):
        readline = Readline()
        monkeypatch.setattr(talking, "readline", readline)
        with TypedLines(history=history):
            readline.lines.append(typed)
    assert history.read_text() == "one\ntwo\n"
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_history_that_cannot_be_kept_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    monkeypatch.setattr(talking, "readline", Readline())
    (tmp_path / "file").touch()
    with TypedLines(history=tmp_path / "file" / "chat_history"):
        pass


def test_a_pipe_leaves_the_history_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"secret\n"))
    with TypedLines(history=tmp_path / "history") as lines:
        read_all(lines)
    assert not (tmp_path / "history").exists()


def test_commands_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    readline = Readline()
    monkeypatch.setattr(talking, "readline", readline)
    with TypedLines(completions=["/save", "/set", "/help"]):
        found = [readline.completer("/s", state) for state in range(3)]
    assert found == ["/save", "/set", None]
    assert readline.completer("", 0) is None
