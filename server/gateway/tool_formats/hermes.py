"""Hermes's form, which Qwen's models and many others have: `<tool_call>`, a JSON object, `</tool_call>`."""

from server.gateway.reply.json_call import json_call
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source, stops
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = stops(OPEN)


def read(source: Source, reply: Reply) -> Reading:
    """Text and calls, in any order."""
    while (yield from source.pass_text(_MARKERS, reply.text)) is not None:
        source.record(OPEN)
        if (yield from json_call(source, reply)):
            yield from source.space()
            yield from source.close(CLOSE)


HERMES = ToolFormat(
    name="hermes",
    shape=CallShape(
        before=f'{OPEN}\n{{"name": "',
        between='", "arguments": ',
        after=f"}}\n{CLOSE}",
        separator="\n",
    ),
    read=read,
    markers=(OPEN, CLOSE),
    signs=(OPEN, '"arguments"'),
)
