"""Finds how a chat template reads a conversation, by rendering small ones and looking for their texts."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat.template_reading import (
    Arguments,
    Message,
    NullContent,
    Systems,
    TemplateReading,
    ToolGap,
    fitted,
    fitted_tools,
)

# Texts that no template contains or changes, and of which none contains another.
_SYSTEM, _MORE, _USER, _REPLY, _LAST = ("zq1system", "zq2more", "zq3user", "zq4reply", "zq5last")
_RESULT, _OTHER_RESULT, _SAID = ("zq6result", "zq7result", "zq8said")
_CALLED, _ALSO_CALLED, _KEY, _VALUE = ("zq9called", "zq0called", "zqkey", "zqvalue")
_PARTS = ("zqpart1", "zqpart2", "zqpart3")
_CUT = '{"zqcut'
_ARGUMENTS = json.dumps({_KEY: _VALUE})
_IDS = ("zqcall001", "zqcall002")
_LONG_ID = "call_0123456789abcdef01234567"  # as OpenAI's, and ours
_FULL_TOOL: dict[str, Any] = {
    "name": "zqtool",
    "description": "A tool.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "An argument."}}},
}
_GAPS: dict[ToolGap, dict[str, Any]] = {
    "description": {"name": "zqtool", "parameters": _FULL_TOOL["parameters"]},
    "parameters": {"name": "zqtool", "description": "A tool."},
    "properties": {"name": "zqtool", "description": "A tool.", "parameters": {"type": "object"}},
    "properties' descriptions": {
        "name": "zqtool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NULLS: tuple[NullContent, ...] = ("null", "absent", "empty")
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]


def probe(render: Render, *, has_tools: bool, names_developer: bool) -> TemplateReading:
    """Find the form in which the template shows the whole of a conversation, with or without tools.

    `render` raises InvalidRequest for messages that the template refuses. Each field of the form keeps its
    default if the template accepts that, or accepts no other value. `names_developer`: the source contains
    that word.
    """
    return _Probe(render, has_tools=has_tools).reading(names_developer=names_developer)


class _Probe:
    def __init__(self, render: Render, *, has_tools: bool) -> None:
        self._render = render
        self._tools = [_tool(_FULL_TOOL)] if has_tools else None
        self._history_length = len(_history())

    def reading(self, *, names_developer: bool) -> TemplateReading:
        known = TemplateReading(knows_developer=True)
        developer = [_message("developer", _SYSTEM), _user()]
        if not (names_developer and self._shows(developer, known, _SYSTEM, _USER)):
            known = replace(known, knows_developer=False)
        if self._needs_list([_user()], 0, known):
            known = replace(known, only_lists=frozenset(_ROLES))
        known = self._with_calls(known)
        known = self._with_systems(known)
        if self._refuses([_user(), _user(_LAST)], known):
            merged = replace(known, one_user=True)
            if self._shows([_user(), _user(_LAST)], merged, _USER, _LAST):
                known = merged
        known = self._with_lists(known)
        return self._with_tools(known)

    def _out(self, messages: Sequence[Message], reading: TemplateReading) -> str | None:
        """The rendered text; None if the template refuses the messages or fails on them."""
        tools = self._tools and fitted_tools(self._tools, reading)
        try:
            return self._render(fitted(messages, reading), tools)
        except InvalidRequest:
            return None

    def _shows(self, messages: Sequence[Message], reading: TemplateReading, *texts: str) -> bool:
        out = self._out(messages, reading)
        return out is not None and all(text in out for text in texts)

    def _refuses(self, messages: Sequence[Message], reading: TemplateReading) -> bool:
        return self._out(messages, reading) is None

    def _hides(self, messages: Sequence[Message], reading: TemplateReading, text: str) -> bool:
        """Whether the template takes the messages and shows the user's, but not this text."""
        out = self._out(messages, reading)
        return out is not None and _USER in out and text not in out

    # Tool calls

    def _with_calls(self, known: TemplateReading) -> TemplateReading:
        forms = [replace(known, null=null) for null in _NULLS]
        if all(self._refuses(_history(), form) for form in forms):
            self._history_length = 3  # some templates take no reply after a tool's result
        called = self._history()
        fits = self._call_form(known)
        if fits is None:
            known = max(forms, key=self._merit)
            hides_calls = self._hides(called, known, _CALLED)
            return replace(known, hides_calls=hides_calls, hides_results=self._hides(called, known, _RESULT))
        known = fits
        with_content = self._history(content=_SAID)
        if not self._shows(with_content, known, _CALLED):
            alone = replace(known, calls_alone=True)
            known = alone if self._shows(with_content, alone, _CALLED, _SAID) else known
        both = (_CALLED, _ALSO_CALLED, _RESULT, _OTHER_RESULT)
        if not self._shows(_two_calls(), known, *both):
            one = replace(known, one_call=True)
            known = one if self._shows(_two_calls(), one, *both) else known
        with_long_id = self._history(call_id=_LONG_ID)
        if not self._shows(with_long_id, known, _CALLED):
            short = replace(known, short_ids=True)
            known = short if self._shows(with_long_id, short, _CALLED) else known
        return replace(known, hides_results=self._hides(called, known, _RESULT))

    def _history(self, **changes: str) -> list[dict[str, Any]]:
        return _history(**changes)[: self._history_length]

    def _call_form(self, known: TemplateReading) -> TemplateReading | None:
        """The form in which the template shows the whole of a call; None if there is none."""
        null: NullContent
        for names_results, null in itertools.product((False, True), _NULLS):
            form = replace(known, null=null, names_results=names_results)
            as_text = self._call_shown(replace(form, arguments="text"), _ARGUMENTS)
            as_object = self._call_shown(replace(form, arguments="object"), _KEY, _VALUE)
            if as_text is None and as_object is None:
                continue
            # If both are shown but differ, the object is in the model's form, and the text as it came.
            arguments: Arguments = "object" if as_text is None else "text"
            if as_text is not None and as_object is not None:
                arguments = "either" if as_text == as_object else "object"
            form = replace(form, arguments=arguments)
            takes_cut = self._out(self._history(arguments=_CUT), form)
            shown = takes_cut is not None and (_CUT in takes_cut or json.dumps(_CUT) in takes_cut)
            return replace(form, text_for_object=shown)
        return None

    def _call_shown(self, form: TemplateReading, *texts: str) -> str | None:
        """The rendered text if it shows the call as JSON or in the model's form, not as Python objects."""
        out = self._out(self._history(), form)
        if out is None or self._says_none(out, form) or f"{{'{_KEY}'" in out:
            return None
        return out if all(text in out for text in (_CALLED, *texts)) else None

    def _says_none(self, out: str, form: TemplateReading) -> bool:
        return out.count("None") > (self._out([_user()], form) or "").count("None")

    def _merit(self, form: TemplateReading) -> tuple[bool, bool, bool]:
        """Rank a form for a template that never shows the whole of a call."""
        out = self._out(self._history(), form)
        return out is not None, _CALLED in (out or ""), out is not None and not self._says_none(out, form)

    # System messages

    def _with_systems(self, known: TemplateReading) -> TemplateReading:
        leading = [_message("system", _SYSTEM), _message("system", _MORE), _user()]
        later = [_message("system", _SYSTEM), _user(), _reply(), _message("system", _MORE), _user(_LAST)]
        systems: Systems
        for systems in ("each", "leading", "all"):
            form = replace(known, systems=systems)
            if self._shows(leading, form, _SYSTEM, _MORE) and self._shows(later, form, _SYSTEM, _MORE):
                known = form
                break
        else:
            form = replace(known, systems="user")
            if self._hides(leading[1:], known, _MORE) and self._shows(later, form, _SYSTEM, _MORE):
                known = form
        endings = [[_user(), _reply()], _history()[:3]]
        hiding = [
            sample
            for sample in ([_message("system", _SYSTEM), *ending] for ending in endings)
            if self._hides(sample, known, _SYSTEM)
        ]
        form = replace(known, system_in_user=True)
        if hiding and all(self._shows(sample, form, _SYSTEM) for sample in hiding):
            known = form
        return known

    # Content

    def _with_lists(self, known: TemplateReading) -> TemplateReading:
        samples = [
            [_message("system", _SYSTEM), _user()],
            [_message("system", _SYSTEM), _user(), _reply(), _user(_LAST)],
            [_user(), _reply(), _user(_LAST)],
            _history(),
            _history(content=_SAID),
            _history()[:3],
        ]
        if known.knows_developer:
            samples.append([_message("developer", _SYSTEM), _user(), _reply(), _user(_LAST)])
        lists, only_lists = set[str](), set[str]()
        for role in _ROLES:
            places = [
                (sample, i)
                for sample in samples
                for i, message in enumerate(sample)
                if message["role"] == role and message.get("content")
            ]
            if known.systems == "user" and role == "system":
                continue
            needs = role in known.only_lists
            needs = needs or any(self._needs_list(sample, i, known) for sample, i in places)
            if needs:
                only_lists.add(role)
            takes = [self._takes_list(sample, i, known, needs=needs) for sample, i in places]
            if True in takes and False not in takes:
                lists.add(role)
        return replace(known, lists=frozenset(lists), only_lists=frozenset(only_lists))

    def _takes_list(
        self, sample: list[dict[str, Any]], i: int, known: TemplateReading, *, needs: bool
    ) -> bool | None:
        """Whether three parts are all shown, in order, and none as the source text of an object.

        None if the template never shows this message's text. `needs`: it shows only lists.
        """
        text = sample[i]["content"]
        as_text = (self._raw(sample, known, i, [text]) if needs else self._out(sample, known)) or ""
        if text not in as_text:
            return None
        parts = self._raw(sample, known, i, _PARTS) or ""
        places = [parts.find(part) for part in _PARTS]
        as_source = any(parts.count(key) > as_text.count(key) for key in ("'text'", '"text"'))
        return not as_source and -1 not in places and places == sorted(places)

    def _needs_list(self, sample: list[dict[str, Any]], i: int, known: TemplateReading) -> bool:
        text = sample[i]["content"]
        if self._shows(sample, known, text):
            return False
        return text in (self._raw(sample, known, i, [text]) or "")

    def _raw(
        self, sample: list[dict[str, Any]], known: TemplateReading, i: int, parts: Sequence[str]
    ) -> str | None:
        """The rendered text with these parts as the content of message `i`, unchanged by `fitted`."""
        content = [{"type": "text", "text": part} for part in parts]
        role = sample[i]["role"]
        if len(parts) == 1:
            form = replace(known, only_lists=frozenset([role]))
        else:
            form = replace(known, lists=frozenset([role]))
        changed = [{**message, "content": content} if j == i else message for j, message in enumerate(sample)]
        return self._out(changed, form)

    # Tools

    def _with_tools(self, known: TemplateReading) -> TemplateReading:
        if self._tools is None or self._refuses([_user()], known):
            return known
        gaps = set[ToolGap]()
        for gap, function in _GAPS.items():
            self._tools = [_tool(function)]
            filled = replace(known, tool_gaps=frozenset([gap]))
            if self._refuses([_user()], known) and not self._refuses([_user()], filled):
                gaps.add(gap)
        return replace(known, tool_gaps=frozenset(gaps))


def _message(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _user(text: str = _USER) -> dict[str, Any]:
    return _message("user", text)


def _reply() -> dict[str, Any]:
    return _message("assistant", _REPLY)


def _call(name: str, call_id: str, arguments: str = _ARGUMENTS) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _history(
    *, content: str | None = None, arguments: str = _ARGUMENTS, call_id: str = _IDS[0]
) -> list[dict[str, Any]]:
    """A conversation with a call and its result, followed by two messages."""
    return [
        _user(),
        _message("assistant", content, tool_calls=[_call(_CALLED, call_id, arguments)]),
        _message("tool", _RESULT, tool_call_id=call_id),
        _reply(),
        _user(_LAST),
    ]


def _two_calls() -> list[dict[str, Any]]:
    calls = [_call(_CALLED, _IDS[0]), _call(_ALSO_CALLED, _IDS[1])]
    return [
        _user(),
        _message("assistant", None, tool_calls=calls),
        _message("tool", _RESULT, tool_call_id=_IDS[0]),
        _message("tool", _OTHER_RESULT, tool_call_id=_IDS[1]),
    ]


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}
