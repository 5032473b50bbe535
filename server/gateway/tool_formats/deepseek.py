"""DeepSeek's forms. V3, R1: `function<sep>NAME` and arguments in a block of code; V3.1: `NAME<sep>{...}`."""

from collections.abc import Generator

from server.gateway.reply.json_call import named_call
from server.gateway.reply.reply import Reply
from server.gateway.reply.source import Reading, Source, stops
from server.gateway.tool_formats.tool_format import CallShape, ToolFormat

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OPEN = stops(OPEN)


def read(source: Source, reply: Reply) -> Reading:
    """Text, and calls in either form."""
    while (yield from source.pass_text(_OPEN, reply.text)) is not None:
        source.record(OPEN)
        after_call = False
        while True:
            yield from source.space()
            mark = yield from source.close(CALL, CLOSE)
            if mark is None and not (after_call and source.ended):
                reply.text(source.recorded())
            if mark != CALL or not (yield from _call(source, reply)):
                break
            after_call = True
            source.record()
        source.recorded()


def _call(source: Source, reply: Reply) -> Generator[None, None, bool]:
    name = yield from source.word()
    yield from source.marker(SEP)
    in_block = name == "function" and not (yield from source.at("{"))
    if in_block:
        name = yield from source.word()
        yield from source.space()
        yield from source.marker("```json")
    is_call = yield from named_call(source, reply, name)
    if is_call:
        yield from source.space()
        if in_block:
            yield from source.close("```")
            yield from source.space()
        yield from source.close(CALL_END)
    return is_call


_MARKERS = (OPEN, CLOSE, CALL, CALL_END, SEP)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    shape=CallShape(
        open=OPEN,
        before=f"{CALL}function{SEP}",
        between="\n```json\n",
        after=f"\n```{CALL_END}",
        separator="\n",
        close=CLOSE,
    ),
    read=read,
    markers=_MARKERS,
    signs=(OPEN, "```json"),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    shape=CallShape(open=OPEN, before=CALL, between=SEP, after=CALL_END, separator="", close=CLOSE),
    read=read,
    markers=_MARKERS,
    signs=(OPEN,),
    not_signs=("```json",),
)
