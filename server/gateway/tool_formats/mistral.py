"""Mistral's forms: `[TOOL_CALLS]` and a JSON list of calls, or, newer, `[TOOL_CALLS]name[ARGS]{...}`."""

from collections.abc import Generator

from server.gateway.reply.json_call import json_call, named_call
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source, stops
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPEN = stops(OPEN)


def read(source: Source, reply: Reply) -> Reading:
    """Text, and calls in either form."""
    while (yield from source.pass_text(_OPEN, reply.text)) is not None:
        source.record(OPEN)
        yield from source.space()
        if (yield from source.marker("[")) is not None:
            yield from _list(source, reply)
        elif (yield from source.at("{")):
            yield from json_call(source, reply)
        else:
            yield from _named(source, reply)


def _list(source: Source, reply: Reply) -> Reading:
    while (yield from json_call(source, reply)):
        source.record()
        yield from source.space()
        mark = yield from source.marker(",", "]")
        if mark != ",":
            if mark is None:
                reply.text(source.recorded())
            return


def _named(source: Source, reply: Reply) -> Generator[None, None, bool]:
    name = yield from source.word()
    if (yield from source.marker(CALL_ID)) is not None:
        yield from source.word()
    yield from source.marker(ARGS)
    return (yield from named_call(source, reply, name))


_MARKERS = (OPEN, ARGS, CALL_ID)
MISTRAL = ToolFormat(
    name="mistral",
    shape=CallShape(
        open=f"{OPEN}[",
        before='{"name": "',
        between='", "arguments": ',
        after="}",
        separator=", ",
        close="]",
    ),
    read=read,
    markers=_MARKERS,
    signs=(OPEN,),
    not_signs=(ARGS,),
)
MISTRAL_V11 = ToolFormat(
    name="mistral_v11",
    shape=CallShape(before=OPEN, between=ARGS, after="", separator=""),
    read=read,
    markers=_MARKERS,
    signs=(OPEN, ARGS),
)
