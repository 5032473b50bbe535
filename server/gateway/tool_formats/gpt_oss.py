"""OpenAI's harmony, which gpt-oss writes: every part of a reply is a message with a channel.

<|channel|>analysis<|message|>REASONING<|end|><|start|>assistant
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
<|channel|>final<|message|>TEXT<|return|>
"""

import re
from collections.abc import Callable, Generator

from server.gateway.reply.json_call import named_call
from server.gateway.reply.reasoning_format import ReasoningFormat
from server.gateway.reply.reply import Read, Reply
from server.gateway.reply.source import Reading, Source, stops
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN)
_END = stops(END, START, CALL, RETURN)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def harmony(*, has_reasoning: bool) -> Read:
    """Read messages: reasoning in the channel `analysis`, calls to functions, and text in the others.

    Without `has_reasoning` that channel is text too.
    """

    def read(source: Source, reply: Reply) -> Reading:
        has_text = False
        while True:
            begin = source.offset
            source.record()
            yield from source.marker(START)
            yield from source.marker("assistant")
            head = yield from _head(source)
            if head is None:
                reply.text(source.recorded())
                return
            to = _RECIPIENT.search(head)
            if to is not None:
                is_call = yield from named_call(source, reply, to[1])
                yield from _body(source, _nothing if is_call else reply.text)
            elif has_reasoning and f"{CHANNEL}analysis" in head:
                source.recorded()
                reply.begin_reasoning(begin)
                yield from _body(source, reply.reasoning)
                reply.end_reasoning(source.offset)
            else:
                source.recorded()
                if has_text:
                    reply.text("\n\n")
                has_text = True
                yield from _body(source, reply.text)

    return read


def _head(source: Source) -> Generator[None, None, str | None]:
    """Read a message's head, its channel and recipient. None if the text does not begin a message."""
    yield from source.space()
    head = yield from source.marker(CHANNEL, "to=")
    while head is not None:
        head += yield from source.until_angle()
        mark = yield from source.marker(MESSAGE, CHANNEL, CONSTRAIN)
        if mark == MESSAGE:
            return head
        head = None if mark is None else head + mark
    return None


def _body(source: Source, to: Callable[[str], object]) -> Reading:
    """Read a message's text and the marker that ends it."""
    yield from source.pass_text(_END, to)


def _nothing(text: str) -> None:
    """Drop text: what follows the arguments of a call is not part of the reply."""


GPT_OSS = ToolFormat(
    name="gpt_oss",
    shape=CallShape(
        before=f"{CHANNEL}commentary to=functions.",
        between=f" {CONSTRAIN}json{MESSAGE}",
        after="",
        separator="",
    ),
    read=harmony(has_reasoning=True),
    markers=MARKERS,
    signs=(CHANNEL, "functions"),
)
GPT_OSS_REASONING = ReasoningFormat(
    name="gpt_oss",
    open=f"{CHANNEL}analysis{MESSAGE}",
    close=END,
    signs=(f"{CHANNEL}analysis",),
)
