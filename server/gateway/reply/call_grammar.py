"""The grammar of a reply with tool calls or reasoning, in llguidance's Lark.

After its marker, a call follows its function's schema. Any text may come before the first marker: it is a
lazy lexeme of llguidance, or, if the marker is a special token, simply text, which never contains special
tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum

from orca_jax.request.chat.tools import OfferedTool
from server.gateway.reply.reasoning_format import ReasoningFormat
from server.gateway.tool_formats.gpt_oss import CHANNEL, END, GPT_OSS, MESSAGE, START
from server.gateway.tool_formats.tool_format import ToolFormat

_ANY = r"(.|\n)*"
_SPACE = r"/[ \n]{0,2}/"  # between reasoning and grammatically constrained output


class Thinking(Enum):
    """Whether the reply begins inside reasoning, may begin with reasoning, or has none."""

    OPENED = "opened"
    MAYBE = "maybe"
    NONE = "none"


class Special:
    """Writes texts as Lark. Special tokens, which are not text, are written by their ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._split = re.compile(f"({'|'.join(map(re.escape, ids))})" if ids else r"(?!)()")

    def lark(self, text: str) -> str:
        """Lark for a text that may contain special tokens."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts)

    def __contains__(self, text: str) -> bool:
        return text in self._ids

    def until(self, rule: str, text: str, marker: str) -> str:
        """A rule for text that the terminal `text` matches, up to and including the marker."""
        lazy = "" if marker in self else "[lazy]"
        return f"{rule}{lazy}: {text} {self.lark(marker)}"


class ReplyGrammar:
    """Makes the grammar of one request's replies: optional reasoning, then calls or text."""

    def __init__(
        self, special: Special, reasoning: ReasoningFormat | None = None, thinking: Thinking = Thinking.NONE
    ) -> None:
        self._special = special
        self._reasoning = None if thinking is Thinking.NONE else reasoning
        self._thinking = thinking
        self._rules = [f"TEXT: /{_ANY}/"]

    def for_body(self) -> str:
        """The grammar of reasoning followed by what the client's grammar allows."""
        return self._with_start(self._forced("@body"))

    def for_calls(
        self,
        form: ToolFormat,
        tools: Sequence[OfferedTool],
        *,
        must_call: bool,
        parallel: bool,
        has_body: bool,
    ) -> str:
        """The grammar of calls of `tools`, whose arguments follow the schemas of `OutputForm`.

        Without `must_call` the reply may have text, or with `has_body` follow the client's grammar instead.
        """
        self._rules += [f"args_{i}: @schema_{i}" for i in range(len(tools))]
        shape = form.shape
        marker = next((each for each in form.markers if form.first_marker.startswith(each)), "")
        calls = [(f"{shape.before}{tool.name}{shape.between}", f"args_{i}") for i, tool in enumerate(tools)]
        if shape.open:
            self._call_rule("call", calls, shape.after)
            again = f" ({self._special.lark(shape.separator)} call)*" if parallel else ""
            opened = self._special.lark(shape.open.removeprefix(marker))
            self._rules.append(f"rest: {opened} call{again} {self._special.lark(shape.close)}")
            self._rules.append(f"calls: {self._special.lark(marker)} rest")
        else:
            self._call_rule(
                "rest", [(begin.removeprefix(marker), args) for begin, args in calls], shape.after
            )
            first = f"{self._special.lark(marker)} rest"
            again = f" ({self._special.lark(shape.separator)} {first})*" if parallel else ""
            self._rules.append(f"calls: {first}{again}")
        if must_call:
            return self._with_start(self._forced("calls"))
        if has_body:
            return self._with_start(self._forced("(calls | @body)"))
        if form.is_whole:
            return self._with_start(self._text_or_calls(rf'\s*\{{\s*"name"{_ANY}'))
        return self._with_start(self._text_and_calls(marker, parallel=parallel))

    def for_messages(self, tools: Sequence[OfferedTool], *, must_call: bool, has_body: bool) -> str:
        """The grammar of harmony's messages: reasoning and text, then one call or the final answer."""
        lark, shape = self._special.lark, GPT_OSS.shape
        self._rules += [f"args_{i}: @schema_{i}" for i in range(len(tools))]
        heads = [lark(f"{CHANNEL}{channel}{MESSAGE}") for channel in ("analysis", "commentary")]
        self._rules.append(self._special.until("text", "TEXT", END))
        self._rules.append(f"before: ({' | '.join(heads)}) text {lark(f'{START}assistant')}")
        ends = [
            f"{lark(f'{shape.before}{tool.name}{shape.between}')} args_{i}" for i, tool in enumerate(tools)
        ]
        if not must_call:
            ends.append(f"{lark(f'{CHANNEL}final{MESSAGE}')} {'@body' if has_body else 'TEXT'}")
        return self._with_start(f"before* ({' | '.join(ends)})")

    def _call_rule(self, name: str, calls: Sequence[tuple[str, str]], after: str) -> None:
        lark = self._special.lark
        options = [f"{lark(begin)} {args} {lark(after)}" for begin, args in calls]
        self._rules.append(f"{name}: {' | '.join(options)}")

    def _forced(self, what: str) -> str:
        """Optional reasoning before constrained output."""
        thought = self._thought()
        if thought is None:
            return what
        return (
            f"{thought} {_SPACE} {what}"
            if self._thinking is Thinking.OPENED
            else f"({thought} {_SPACE})? {what}"
        )

    def _text_and_calls(self, marker: str, *, parallel: bool) -> str:
        self._rules.append(self._special.until("head", "TEXT", marker))
        reply = "(head rest)* TEXT" if parallel else "(head rest | TEXT)"
        thought = self._thought()
        if thought is None:
            return reply
        if self._thinking is Thinking.OPENED:
            return f"{thought} {reply}"
        self._plain_rule()
        self._rules.append(self._special.until("first", "PLAIN", marker))
        again = " (head rest)* TEXT" if parallel else ""
        return f"{thought} {reply} | first rest{again} | PLAIN"

    def _text_or_calls(self, call: str) -> str:
        thought = self._thought()
        self._plain_rule(call)
        if thought is None:
            return "calls | PLAIN"
        if self._thinking is Thinking.OPENED:
            return f"{thought} {_SPACE} (calls | PLAIN)"
        return f"({thought} {_SPACE})? (calls | PLAIN)"

    def _plain_rule(self, *not_begun: str) -> None:
        """Add the terminal PLAIN: text that begins like neither these patterns nor reasoning."""
        if self._thinking is Thinking.MAYBE and self._reasoning and self._reasoning.open not in self._special:
            not_begun += (rf"\s*{re.escape(self._reasoning.open)}{_ANY}",)
        self._rules.append(" & ".join([f"PLAIN: /{_ANY}/", *[f"~/{each}/" for each in not_begun]]))

    def _thought(self) -> str | None:
        """Lark for reasoning up to and including its end marker; None if the reply has none."""
        if self._reasoning is None:
            return None
        self._rules.append(self._special.until("thought", "TEXT", self._reasoning.close))
        is_opened = self._thinking is Thinking.OPENED
        return "thought" if is_opened else f"{self._special.lark(self._reasoning.open)} thought"

    def _with_start(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])
