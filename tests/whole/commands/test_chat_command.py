"""`orca chat`: turns, commands, mistakes and Ctrl-C, through a pipe and at a terminal."""

import builtins
import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from server import cli
from server.commands import chat_session
from server.gateway.reply.reply_plan import ReplyReader
from tests.places import ROOT
from tests.whole.lent import Lent

SOON = 300  # seconds that nothing here takes
# Short, because the tiny model reads 64 tokens, which are bytes.
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}a"
ROLES = {"s": "system", "u": "user", "a": "assistant"}


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return str(tmp_path / "chat.jinja")


@pytest.fixture
def arguments(template: str, tiny_directory: Path, lent: Lent) -> list[str]:
    flags = ["--chat-template", template, "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    return ["chat", str(tiny_directory), *flags]


Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Write lines into the command's stdin."""

    def talk(lines: Sequence[str], *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Stdin("".join(line + "\n" for line in lines).encode()))
        status = cli.main([*arguments, *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return talk


@pytest.fixture
def typed(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Talk:
    """Type lines at a terminal; an exception among them is raised instead of returning a line."""

    def talk(lines: Iterable[str | BaseException], *flags: str) -> tuple[int, str, str]:
        left = iter(lines)

        def type_one(_prompt: str = "") -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
        monkeypatch.setattr(builtins, "input", type_one)
        status = cli.main([*arguments, *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return talk


def next_reply(llm: LLM, prompt: str, **changes: Any) -> str:
    params: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **changes}
    (result,) = llm.generate(prompt, SamplingParams(**params))
    return result.text


def prompts_of(llm: LLM, turns: Sequence[str], system: str = "") -> tuple[list[str], list[str]]:
    """The prompts and replies of a conversation, made with `generate` only."""
    prompts, replies = list[str](), list[str]()
    text = system
    for turn in turns:
        text += f"u{turn};a"
        prompts.append(text)
        replies.append(next_reply(llm, text))
        text += f"{replies[-1]};"
    return prompts, replies


def test_each_line_of_a_pipe_is_a_turn(piped: Talk, tiny: LLM) -> None:
    _, replies = prompts_of(tiny, ["ab", "c", "d\ne"])
    assert len(set(replies)) > 1
    status, out, err = piped(["ab", "", "c", '"""d', 'e"""'])
    assert (status, out) == (0, "".join(reply + "\n" for reply in replies))
    assert ">>>" not in err


def test_a_system_prompt_and_another_template(piped: Talk, tiny: LLM, tmp_path: Path) -> None:
    (tmp_path / "system").write_text("be")
    _, replies = prompts_of(tiny, ["ab"], system="sbe;")
    for flags in (["--system", "be"], ["--system", f"@{tmp_path}/system"]):
        assert piped(["ab"], *flags)[:2] == (0, f"{replies[0]}\n")
    _, replies = prompts_of(tiny, ["ab"])
    assert piped(["ab"])[1] == f"{replies[0]}\n" != piped(["ab"], "--system", "be")[1]


def test_commands_change_the_conversation(typed: Talk, tiny: LLM, tmp_path: Path) -> None:
    _, (first, second) = prompts_of(tiny, ["ab", "c"])
    saved = tmp_path / "saved.jsonl"
    status, out, err = typed(
        ["ab", "c", "/undo", "c", f"/save {saved}", f"/save {saved}", "/clear", "ab", "/quit"]
    )
    assert status == 0
    assert out == "".join(reply + "\n" for reply in (first, second, second, first))
    assert "the last message and its reply are dropped; 1 are left" in err
    assert f"{saved} exists; name another file" in err
    (line,) = saved.read_text().splitlines()
    pairs = [("user", "ab"), ("assistant", first), ("user", "c"), ("assistant", second)]
    assert json.loads(line) == {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_retry_replies_to_the_same_message(typed: Talk, tiny: LLM) -> None:
    prompts, (first, second) = prompts_of(tiny, ["ab", "c"])
    hot = [next_reply(tiny, prompts[1], temperature=50.0, seed=7)]
    lines = ["ab", "c", "/set temperature 50", "/set seed 7", "/retry", "/set temperature 0", "/retry"]
    _, out, _ = typed(lines)
    assert out.splitlines() == [*"\n".join([first, second, *hot, second]).splitlines(), ""]


def test_set_reads_values_as_the_flags_do(typed: Talk, tiny: LLM) -> None:
    prompts, (reply,) = prompts_of(tiny, ["ab"])
    longer = next_reply(tiny, prompts[0], max_tokens=9)
    mark = next(letter for letter in reply if letter.isascii() and letter.isalnum())
    status, out, err = typed(
        [
            *("/set max_tokens 9", "ab", "/clear"),
            *("/set max-tokens 4", f"/set stop {mark} 'z z'", "/set ignore_eos false"),
            *("/set ignore_eos true", "ab", "/set stop default", "/set", "/retry"),
            *(
                "/set temperature nan",
                "/set temperatur 1",
                "/set seed",
                "/set n 2",
                "/set seed x",
                "/set stop 'a",
            ),
        ]
    )
    assert status == 0
    assert out == f"{longer}\n{reply.partition(mark)[0]}\n{reply}\n\n"
    for note in (
        "max_tokens 9\n",
        f"stop {(mark, 'z z')}\n",
        "ignore_eos False\n",
        "temperature 0.0\n",
        "max_tokens 4\n",
        "stop ()\n",
        "temperature is nan; it must be 0, or a number",
        "/set knows no temperatur; did you mean temperature?; /set alone lists all",
        "/set seed lacks its value",
        "/set knows no n",
        "--seed: invalid int value: 'x'",
        "/set stop 'a: No closing quotation",
    ):
        assert note in err, note


def test_the_system_prompt_can_change(typed: Talk, tiny: LLM) -> None:
    _, (plain,) = prompts_of(tiny, ["ab"])
    _, (ruled,) = prompts_of(tiny, ["ab"], system="sbe;")
    status, out, err = typed(["/system", "/system be", "ab", "/clear", "/system", '/system ""', "ab"])
    assert (status, out) == (0, f"{ruled}\n{plain}\n\n")
    for note in (
        "there is no system prompt",
        "is set",
        "with the same system prompt",
        ">>> be\n",
        "is removed",
    ):
        assert note in err, note


def test_mistakes_at_a_terminal_end_nothing(typed: Talk, tiny: LLM) -> None:
    _, (reply,) = prompts_of(tiny, ["/ab"])
    status, out, err = typed(
        [
            "/halp",
            "/clear now",
            "/undo",
            "/retry",
            "/stats",
            "/save",
            "\ud800",
            "x" * 70,
            "//ab",
            "/stats",
            "/help",
        ]
    )
    assert (status, out) == (0, f"{reply}\n\n")
    for note in (
        "/halp is not a command; did you mean help?",
        "/clear takes nothing after it",
        "there is nothing to undo",
        "there is no reply to try again",
        "there is no reply yet",
        "/save lacks the name of a file",
        "lone surrogate",
        "/clear begins a new conversation, /undo drops the last turn",
        "6 tokens (0 of them cached) + 4 tokens, the first after",
        "/set [NAME VALUE]  show the sampling parameters",
    ):
        assert note in err, note


def test_a_mistake_in_a_pipe_ends_the_command(piped: Talk) -> None:
    for lines, message in (
        (["x" * 70, "ab"], "/clear begins a new"),
        (["/halp", "ab"], "/halp is not a command"),
    ):
        status, out, err = piped(lines)
        assert (status, out) == (2, "")
        assert message in err


def test_a_conversation_that_fills_the_model(typed: Talk, tiny: LLM) -> None:
    status, out, err = typed(["ab", "/set max_tokens default", "c", "d", "/undo", "/set max_tokens 4", "d"])
    _, (first, *_) = prompts_of(tiny, ["ab"])
    _, (_, last) = prompts_of(tiny, ["ab", "d"])
    assert status == 0
    assert "cut: the conversation fills the model's 64 tokens; /clear begins a new one" in err
    assert "leave no room" in err or "at most 63" in err
    assert out.startswith(f"{first}\n") and out.endswith(f"{last}\n\n")
    long = "x" * 58  # with room for 3 tokens, which is less than --max-tokens
    status, out, err = typed([long])
    assert (status, out) == (0, next_reply(tiny, f"u{long};a", max_tokens=3) + "\n\n")
    assert "cut: the conversation fills the model's 64 tokens" in err


def test_ctrl_c_stops_the_reply_and_not_the_program(
    typed: Talk, tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (reply,) = prompts_of(tiny, ["ab"])
    show, take = chat_session.Chat._show, ReplyReader.take
    turn = 0

    def shown(chat: chat_session.Chat, events: Any) -> None:
        show(chat, events)
        if turn == 1 and events:
            raise KeyboardInterrupt

    def taken(reader: ReplyReader, piece: Any) -> Any:
        if turn in (2, 3):
            raise KeyboardInterrupt
        return take(reader, piece)

    def next_turn(line: str) -> str:
        nonlocal turn
        turn += 1
        return line

    monkeypatch.setattr(chat_session.Chat, "_show", shown)
    monkeypatch.setattr(ReplyReader, "take", taken)
    saved = tmp_path / "saved"
    lines = ["ab", "/retry", "cd", KeyboardInterrupt(), f"/save {saved}", "/clear", "ab"]
    status, out, err = typed(
        next_turn(line) if isinstance(line, str) and line[1:] in ("b", "retry", "d") else line
        for line in lines
    )
    assert status == 0
    assert out.endswith(f"{reply}\n\n")
    kept = json.loads(saved.read_text())["messages"]
    assert kept[0]["content"] == "ab" and reply.startswith(kept[1]["content"]) and kept[1]["content"]
    for note in (
        "stopped\n",
        "stopped; the earlier reply stays",
        "stopped; the message is taken back",
        "Ctrl-D or /quit ends",
        "2 messages are in",
    ):
        assert note in err, note
    tiny.generate([1], SamplingParams(max_tokens=2))
    assert tiny.service.scheduler.n_rsrv == 0


def test_ctrl_c_in_a_pipe_ends_the_command(piped: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_session.Chat, "_show", interrupted)
    assert piped(["ab", "cd"])[0] == 130


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.commands.chat.pkgutil", None)
    assert cli.main(["chat", str(tiny_directory)]) == 2
    err = capsys.readouterr().err
    assert (
        f"{tiny_directory} has no chat template; give one with --chat-template FILE, or continue text" in err
    )
    assert cli.main(["chat", str(tiny_directory), "--chat-template", "/no/such"]) == 2
    assert "/no/such cannot be read" in capsys.readouterr().err
    assert cli.main(["chat", "--temperature", "nan"]) == 2


# For real

_PROGRAM = """
import fcntl, signal, sys, termios, threading
from server import cli
from server.commands import chat_session

fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # or Ctrl-C would be a character
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
show, n_shown = chat_session.Chat._show, 0

def hanging(chat, events):
    global n_shown
    n_shown += 1
    show(chat, events)
    if n_shown == 1:
        print("<hangs>", flush=True)
        while not threading.Event().wait(0.05):  # without end, one would miss a signal just before it
            pass

chat_session.Chat._show = hanging
sys.exit(cli.main(sys.argv[1:]))
"""


class Terminal:
    """A program with a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=screen, stdout=screen, stderr=screen, env=environment, start_new_session=True
        )
        os.close(screen)
        self._screen = ""

    def see(self, text: str) -> str:
        """Wait for this text; return the output before it."""
        while text not in self._screen:
            ready, _, _ = select.select([self._keyboard], [], [], SOON)
            assert ready, self._screen
            try:
                data = os.read(self._keyboard, 1 << 16)
            except OSError:  # the program has ended
                data = b""
            assert data, f"no {text!r} in {self._screen!r}"
            self._screen += data.decode(errors="replace")
        before, _, self._screen = self._screen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        self.process.wait(SOON)
        os.close(self._keyboard)


def test_at_a_terminal(template: str, tiny_directory: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    environment |= {"XDG_STATE_HOME": str(tmp_path)}
    flags = ["--chat-template", template, "--max-tokens", "3", "--ignore-eos"]
    command = [sys.executable, "-c", _PROGRAM, "chat", str(tiny_directory), *flags]
    with Terminal(command, environment) as terminal:
        assert "/help lists the commands" in terminal.see(">>> ")
        terminal.type("ab\n")
        terminal.see("<hangs>")
        terminal.type("\x03")
        terminal.see("stopped")
        terminal.see(">>> ")
        terminal.type("\x03\n")  # the signal alone may come just before readline waits, which then waits on
        terminal.see("Ctrl-D or /quit ends")
        terminal.see(">>> ")
        terminal.type("c\\\n")
        terminal.see("... ")
        terminal.type("d\n")
        terminal.see("cut after 3 tokens")
        terminal.see(">>> ")
        terminal.type("/st\t\n")  # is completed
        terminal.see("+ 3 tokens, the first after")
        terminal.see(">>> ")
        terminal.type("\x04")
    assert terminal.process.returncode == 0
    history = (tmp_path / "orca" / "chat_history").read_text().splitlines()
    assert [line for line in history if line in ("ab", "c\\", "d")] == ["ab", "c\\", "d"]
