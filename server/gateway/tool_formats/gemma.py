"""The form that Gemma's documentation asks a model for: the reply is a JSON object with `parameters`.

Gemma 3 has no tokens for tools, and often puts the object between the fences of a block of code.
"""

from server.gateway.reply.json_call import json_call
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

_FENCES = ("```json", "```tool_code", "```tool_call")


def read(source: Source, reply: Reply) -> Reading:
    """Calls at the beginning, each perhaps in a block of code; what comes after them is text."""
    while True:
        source.record()
        yield from source.space()
        fence = yield from source.marker(*_FENCES)
        if fence is not None:
            yield from source.space()
        if not (yield from source.at("{")):
            reply.text(source.recorded())
            return
        if not (yield from json_call(source, reply)):
            return
        if fence is not None:
            yield from source.space()
            yield from source.close("```")


GEMMA = ToolFormat(
    name="gemma",
    shape=CallShape(before='{"name": "', between='", "parameters": ', after="}", separator="\n"),
    read=read,
    markers=(),
    signs=("<start_of_turn>", '"parameters"', "tools"),
    is_whole=True,
)
