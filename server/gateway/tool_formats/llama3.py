"""The form of Llama 3 and 4: the reply is a JSON object with `parameters`, or several with `;` between them.

`<|python_tag|>` may come before it.
"""

from server.gateway.reply.json_call import json_call
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source, stops
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

TAG = "<|python_tag|>"
_TAG = stops(TAG)


def read(source: Source, reply: Reply) -> Reading:
    """Calls at the beginning, or after the tag."""
    source.record()
    yield from source.space()
    tag = yield from source.marker(TAG)
    if tag is None and not (yield from source.at("{")):
        reply.text(source.recorded())
    else:
        yield from _calls(source, reply)
    while (yield from source.pass_text(_TAG, reply.text)) is not None:
        source.record(TAG)
        yield from _calls(source, reply)


def _calls(source: Source, reply: Reply) -> Reading:
    """Read calls with separators between them, up to the first text that is not a call."""
    while (yield from json_call(source, reply)):
        source.record()
        yield from source.space()
        if (yield from source.marker(";")) is None:
            reply.text(source.recorded())
            return


LLAMA3 = ToolFormat(
    name="llama3",
    shape=CallShape(before='{"name": "', between='", "parameters": ', after="}", separator="; "),
    read=read,
    markers=(TAG,),
    signs=("<|start_header_id|>", '"parameters"'),
    is_whole=True,
)
