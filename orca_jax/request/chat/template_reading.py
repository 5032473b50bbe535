"""The form in which a chat template shows the whole of a conversation, and messages fitted to it.

Templates differ in what they accept: content as a text or a list of parts, missing content as null or absent,
arguments of tool calls as an object or a text. Given another form they fail, or silently leave out text.
template_probe.py finds each template's form by rendering small conversations.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
JSONObject = dict[str, Any]

# Between the parts of one content, and between messages that become one.
_BETWEEN_PARTS = "\n"
_BETWEEN_MESSAGES = "\n\n"
_SYSTEM = ("system", "developer")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_NO_PARAMETERS: JSONObject = {"type": "object", "properties": {}}

NullContent = Literal["null", "absent", "empty"]
Arguments = Literal["either", "text", "object"]
Systems = Literal["each", "leading", "all", "user"]
ToolGap = Literal["description", "parameters", "properties", "properties' descriptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateReading:
    """The form in which a template shows whole messages. The defaults leave a conversation as it came.

    `lists` are the roles whose content may have several parts, `only_lists` the roles whose content must be a
    list, even of one part. `null` is the content of a message that has only tool calls. `arguments` of tool
    calls are an object, its text, or either; with `text_for_object`, arguments that are no object stay a
    text. `calls_alone`: text in a message hides its calls, so it gets a separate message. `one_call`: a
    message shows only its first call. `short_ids`: ids of calls have nine letters and digits, as Mistral's.
    `names_results`: results of tools have the tool's name. Without `knows_developer` that role becomes
    `system`. `systems`: the template shows "each" system message in its place; or needs the "leading" ones,
    or "all", merged into one; or shows none, so that a "user" message gets their text. `system_in_user` does
    the latter where the last message is not a user's. `one_user`: users' messages without a reply between
    them become one. `tool_gaps` are the fields that every tool must have.

    A template with `hides_calls` shows no tool calls, and one with `hides_results` no results of tools.
    """

    lists: frozenset[str] = frozenset()
    only_lists: frozenset[str] = frozenset()
    null: NullContent = "null"
    arguments: Arguments = "either"
    text_for_object: bool = True
    calls_alone: bool = False
    one_call: bool = False
    short_ids: bool = False
    names_results: bool = False
    knows_developer: bool = False
    systems: Systems = "each"
    system_in_user: bool = False
    one_user: bool = False
    tool_gaps: frozenset[ToolGap] = frozenset()
    hides_calls: bool = False
    hides_results: bool = False


def fitted(messages: Sequence[Message], reading: TemplateReading) -> list[JSONObject]:
    """The messages in the form that the template shows whole. No text is lost.

    Null fields are left out, except the content of messages that have only tool calls.
    """
    fit = [_without_nulls(message) for message in messages]
    if not reading.knows_developer:
        for message in fit:
            if message["role"] == "developer":
                message["role"] = "system"
    fit = _with_systems(fit, reading)
    if reading.one_user:
        fit = _with_one_user(fit)
    fit = _with_calls(fit, reading)
    for message in fit:
        _set_content(message, reading)
    return fit


def fitted_tools(tools: Sequence[Message], reading: TemplateReading) -> list[JSONObject]:
    """The tools with every field that the template cannot do without."""
    return [_tool(tool, reading.tool_gaps) for tool in tools]


def text_of_content(content: Any) -> str:
    """The text of a content: itself, or its parts, line by line."""
    if isinstance(content, str):
        return content
    return _BETWEEN_PARTS.join(part.get("text") or "" for part in content or ())


def _without_nulls(message: Message) -> JSONObject:
    return {key: value for key, value in message.items() if value is not None}


def _with_systems(messages: list[JSONObject], reading: TemplateReading) -> list[JSONObject]:
    systems = [message for message in messages if message["role"] in _SYSTEM]
    if not systems:
        return messages
    others = [message for message in messages if message["role"] not in _SYSTEM]
    last_user = next((message for message in reversed(others) if message["role"] == "user"), None)
    if last_user is not None and (
        reading.systems == "user" or (reading.system_in_user and messages[-1]["role"] != "user")
    ):
        last_user["content"] = _joined([*systems, last_user])
        return others
    if reading.systems == "leading":
        n = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
        return [*_as_one(messages[:n]), *messages[n:]]
    if reading.systems == "all":
        return [*_as_one(systems), *others]
    return messages


def _with_one_user(messages: list[JSONObject]) -> list[JSONObject]:
    merged = list[JSONObject]()
    run = list[JSONObject]()
    for message in messages:
        if message["role"] == "user":
            run.append(message)
            continue
        merged += [*_as_one(run), message]
        run = []
    return [*merged, *_as_one(run)]


def _as_one(messages: list[JSONObject]) -> list[JSONObject]:
    if len(messages) < 2:
        return messages
    return [{**messages[0], "content": _joined(messages)}]


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN_MESSAGES.join(text_of_content(message.get("content")) for message in messages)


def _with_calls(messages: list[JSONObject], reading: TemplateReading) -> list[JSONObject]:
    """Fit tool calls and their results to the template."""
    fit = list[JSONObject]()
    names = dict[str, str]()  # of the called tools, by id
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.pop("tool_calls", None)
        if not calls:
            if message["role"] == "tool":
                _set_result(message, names, reading)
            fit.append(message)
            continue
        calls = [_call(call, reading) for call in calls]
        names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
        if reading.calls_alone and text_of_content(message.get("content")).strip():
            fit.append(message)
            message = {"role": message["role"]}
        if reading.calls_alone:
            message.pop("content", None)
        if not reading.one_call or len(calls) == 1:
            fit.append({**message, "tool_calls": calls})
            continue
        results = list[JSONObject]()
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            _set_result(messages[at], names, reading)
            at += 1
        fit += _one_by_one(message, calls, results)
    return fit


def _one_by_one(message: JSONObject, calls: list[JSONObject], results: list[JSONObject]) -> list[JSONObject]:
    """A message for each call, followed by the call's results. Results without a call come last."""
    results_of = dict[Any, list[JSONObject]]()
    for result in results:
        results_of.setdefault(result.get("tool_call_id"), []).append(result)
    fit = list[JSONObject]()
    for call in calls:
        fit += [{**message, "tool_calls": [call]}, *results_of.pop(call.get("id"), [])]
        message = {"role": message["role"]}
    return [*fit, *(result for rest in results_of.values() for result in rest)]


def _set_result(message: JSONObject, names: Mapping[str, str], reading: TemplateReading) -> None:
    call_id = message.get("tool_call_id")
    if isinstance(call_id, str) and reading.short_ids:
        message["tool_call_id"] = call_id = _short(call_id)
    if reading.names_results and isinstance(call_id, str) and call_id in names:
        message.setdefault("name", names[call_id])


def _call(call: Message, reading: TemplateReading) -> JSONObject:
    fit = _without_nulls(call)
    fit.setdefault("type", "function")
    if "id" in fit and reading.short_ids:
        fit["id"] = _short(fit["id"])
    function = call["function"]
    return {**fit, "function": {"name": function["name"], "arguments": _arguments(function, reading)}}


def _arguments(function: Message, reading: TemplateReading) -> Any:
    given = function.get("arguments") or "{}"
    if isinstance(given, str):
        if reading.arguments != "object":
            return given
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):  # as when a reply was cut off within the call
            parsed = None
        if isinstance(parsed, dict):
            return parsed
        return given if reading.text_for_object else {"arguments": given}
    return json.dumps(given, ensure_ascii=False) if reading.arguments == "text" else given


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _set_content(message: JSONObject, reading: TemplateReading) -> None:
    content, role = message.get("content"), message["role"]
    if content is None and message.get("tool_calls"):
        if reading.null == "absent":
            return
        if reading.null == "null":
            message["content"] = None
            return
    texts = [text_of_content(content)]
    if isinstance(content, list) and len(content) > 1 and role in reading.lists:
        texts = [part.get("text") or "" for part in content]
    as_list = len(texts) > 1 or role in reading.only_lists
    message["content"] = [{"type": "text", "text": text} for text in texts] if as_list else texts[0]


def _tool(tool: Message, gaps: frozenset[ToolGap]) -> JSONObject:
    function: Any = tool.get("function")
    if not gaps or not isinstance(function, Mapping):
        return dict(tool)
    filled = _without_nulls(function)
    if "description" in gaps:
        filled.setdefault("description", "")
    if "parameters" in gaps:
        filled.setdefault("parameters", _NO_PARAMETERS)
    if "properties" in gaps and isinstance(filled.get("parameters"), dict):
        filled["parameters"] = {**_NO_PARAMETERS, **filled["parameters"]}
    if "properties' descriptions" in gaps and isinstance(filled.get("parameters"), dict):
        properties: Any = filled["parameters"].get("properties")
        if isinstance(properties, dict):
            described = {
                name: {"description": "", **value} if isinstance(value, dict) else value
                for name, value in properties.items()
            }
            filled["parameters"] = {**filled["parameters"], "properties": described}
    return {**tool, "function": filled}
