"""Recorded replies of models, parsed whole and cut anywhere, give the same text, reasoning and calls."""

import json
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.gateway.reply.events import (
    CallArguments,
    CallBegin,
    CallCut,
    CallEnd,
    Reasoning,
    ReplyEvent,
    Text,
    whole_reply,
)
from server.gateway.reply.reasoning_format import plain_text
from server.gateway.reply.reply import Read, ReplyParser
from server.gateway.tool_formats.gpt_oss import harmony
from server.gateway.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS
from tests.endpoint.harness import DATA

FOLDER = DATA / "replies"
OFFERED = frozenset({"get_weather", "get_stock_fundamentals", "note"})
CASES: list[tuple[str, dict[str, Any]]] = [
    (path.stem, case)
    for path in sorted(FOLDER.glob("*.json"))
    for case in json.loads(path.read_text("utf-8"))
]


def reader(name: str, reasoning: str | None, *, opened: bool = False) -> Read:
    if name == "gpt_oss":
        return harmony(has_reasoning=reasoning is not None)
    read = TOOL_FORMATS[name].read if name in TOOL_FORMATS else plain_text
    return read if reasoning is None else REASONING_FORMATS[reasoning].reading(read, opened=opened)


def reader_of(name: str, case: dict[str, Any]) -> Read:
    return reader(name, case.get("reasoning_format"), opened=case.get("opened", False))


def read_in(read: Read, pieces: Iterable[str]) -> list[ReplyEvent]:
    parser = ReplyParser(read, OFFERED)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def joined(events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
    """The events with fragments joined, and without the calls' random ids."""
    result = list[ReplyEvent]()
    for event in events:
        last = result[-1] if result else None
        match event, last:
            case (Text(more), Text(text)):
                result[-1] = Text(text + more)
            case (Reasoning(more), Reasoning(text)):
                result[-1] = Reasoning(text + more)
            case (CallArguments(index, more), CallArguments(_, text)):
                result[-1] = CallArguments(index, text + more)
            case (CallBegin(index, _, name), _):
                result.append(CallBegin(index, "", name))
            case _:
                result.append(event)
    return result


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_recorded_reply_is_read(name: str, case: dict[str, Any]) -> None:
    whole = whole_reply(read_in(reader_of(name, case), [case["text"]]))
    calls = [[call.name, call.arguments] for call in whole.calls]
    assert (whole.content, whole.reasoning, calls) == (case["content"], case["reasoning"], case["calls"])
    assert len({call.id for call in whole.calls}) == len(calls)
    for call in whole.calls:
        assert call.id.startswith("call_") and isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_wherever_it_is_cut_the_events_are_the_same(name: str, case: dict[str, Any]) -> None:
    text, read = case["text"], reader_of(name, case)
    whole = joined(read_in(read, [text]))
    assert joined(read_in(read, text)) == whole, "a character at a time"
    for place in range(len(text)):
        assert joined(read_in(read, [text[:place], text[place:]])) == whole, place


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_cut_off_anywhere_it_is_still_read(name: str, case: dict[str, Any]) -> None:
    """A reply that max_tokens cuts off has no invented call, and keeps every complete one."""
    text, read = case["text"], reader_of(name, case)
    for place in range(len(text)):
        whole = whole_reply(read_in(read, [text[:place]]))
        calls = [[call.name, call.arguments] for call in whole.calls]
        assert calls == case["calls"][: len(calls)]
        if place % 8 == 0:
            assert joined(read_in(read, text[:place])) == joined(read_in(read, [text[:place]])), place


def test_every_format_has_recorded_replies() -> None:
    assert {name for name, _ in CASES} == {*TOOL_FORMATS, "none"}
    used = {case.get("reasoning_format") for _, case in CASES} - {None}
    assert used == {*REASONING_FORMATS}
    for name in TOOL_FORMATS:
        assert any(len(case["calls"]) for each, case in CASES if each == name)


def fragments() -> list[str]:
    """Pieces of replies, correct and malformed."""
    marks = {mark for form in TOOL_FORMATS.values() for mark in form.markers}
    marks |= {mark for form in REASONING_FORMATS.values() for mark in (form.open, form.close)}
    return [
        *sorted(marks),
        *('{"name": "note", "arguments": ', '{"text": "a"}', "}", "{", "[", "]", '"', "\\", ", ", "; ", ":"),
        *(
            " ",
            "\n",
            "note",
            "function",
            "```json",
            "```",
            "to=functions.note",
            "assistant",
            "analysis",
            "é<",
        ),
        *('{"name": "note", "parameters": {}}', '"arguments"', "final", "<", "<tool", "```tool_code"),
    ]


@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize("name", [*TOOL_FORMATS, "none"])
@given(pieces=st.lists(st.sampled_from(fragments()), max_size=14), seed=st.integers(0, 1 << 16))
@example(pieces=["<tool_call>", '{"name": "note", "arguments": ', "{", "\\", '"'], seed=0)
@settings(max_examples=40, deadline=None)
def test_malformed_text_is_read_alike_however_cut(
    name: str, reasoning: str | None, pieces: list[str], seed: int
) -> None:
    text = "".join(pieces)
    read = reader(name, reasoning)
    whole = read_in(read, [text])
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(read_in(read, parts)) == joined(whole) == joined(read_in(read, text))
    begun = [event.index for event in whole if isinstance(event, CallBegin)]
    ended = [event.index for event in whole if isinstance(event, CallEnd | CallCut)]
    assert begun == ended == list(range(len(begun)))
    reply = whole_reply(whole)
    assert all(isinstance(json.loads(call.arguments), dict) and call.name in OFFERED for call in reply.calls)
    shown = "".join(filter(None, [reply.content, reply.reasoning, *(call.arguments for call in reply.calls)]))
    assert len(shown) <= len(text) + 2 * len(reply.calls) + 2 * text.count("<|message|>")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_only_what_may_be_a_marker_is_held_back(name: str) -> None:
    parser = ReplyParser(reader(name, None), OFFERED)
    parser.feed("<|channel|>final<|message|>" if name == "gpt_oss" else "")
    markers = TOOL_FORMATS[name].markers
    so_far = shown = ""
    for word in ("Hello", " world,", " a < b", " [x", "] <to", "ol_x", " and", "<", " more."):
        so_far += word
        shown += "".join(event.text for event in parser.feed(word) if isinstance(event, Text))
        held = so_far.removeprefix(shown)
        assert held == "" or held.isspace() or any(mark.startswith(held.lstrip()) for mark in markers), held
    assert shown == so_far


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_time_grows_with_the_text_and_not_its_square(name: str) -> None:
    """Count the characters that are examined, in a text that consists of beginnings of markers."""
    form = TOOL_FORMATS[name]
    for hard in (*form.markers, '{"name": "note", "arguments": {"a": [', '{"', "<", "\\", '"', " "):
        parser = ReplyParser(reader(name, None), OFFERED)
        kept = 0
        for _ in range(400):
            parser.feed(hard)
            kept = max(kept, parser.n_pending)
        assert kept <= 2 * len(hard) + 64, hard
        parser.finish()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_long_piece_with_many_markers_takes_time_in_proportion(name: str) -> None:
    hard = (TOOL_FORMATS[name].first_marker or "{") + " "

    def seconds(n: int) -> float:
        times = list[float]()
        for _ in range(3):
            parser = ReplyParser(reader(name, None), OFFERED)
            began = time.thread_time()
            parser.feed(hard * n)
            parser.finish()
            times.append(time.thread_time() - began)
        return min(times)

    few, many = seconds(500), seconds(8_000)
    assert many < max(0.05, 3 * 16 * few), (few, many)
