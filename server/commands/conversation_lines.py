"""Lines of `orca generate --input` that are conversations: {"messages": [...], "tools": [...], ...}."""

from collections.abc import Collection, Mapping
from typing import Any

from orca_jax.errors import did_you_mean
from orca_jax.request.chat.tools import NO_TOOLS, ToolWish, check_tools
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import GenerationResult
from server.commands.replies import Prepared, Replies
from server.commands.request_lines import BadLine
from server.gateway.reply.events import whole_reply
from server.gateway.reply.reply import ReplyParser

# The fields besides SamplingParams' fields, with their types; null counts as absent.
_RENDERING: dict[str, type] = {
    "documents": list,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "reasoning_effort": str,
    "chat_template_kwargs": dict,
}
_FIELDS: dict[str, type] = {
    "messages": list,
    "tools": list,
    "tool_choice": object,
    "parallel_tool_calls": bool,
    "chat_template": str,
    **_RENDERING,
}
_NAMES = {list: "a list", bool: "true or false", str: "a text", dict: "an object"}
_BATCH = {"custom_id", "method", "url", "body"}


def check_fields(values: Mapping[str, Any], sampling_fields: Collection[str]) -> None:
    """Raise BadLine unless the line has a prompt or messages, and only known fields."""
    if values.keys() >= _BATCH:
        message = "the line is one of OpenAI's batches, which `orca serve --batch-dir` runs (docs/batches.md)"
        raise BadLine(
            f"{message}; here a line is its body, with sampling parameters by our names", param="body"
        )
    is_prompt, is_chat = (values.get(name) is not None for name in ("prompt", "messages"))
    if is_prompt and is_chat:
        raise BadLine("the line has a prompt and messages; give one of them", param="messages")
    if not is_prompt and not is_chat:
        raise BadLine("the line has no prompt and no messages; give one of them", param="prompt")
    known = {"prompt", *sampling_fields} if is_prompt else {*_FIELDS, *sampling_fields}
    known |= {name for name in ("prompt", "messages") if values.get(name, 0) is None}
    if unknown := sorted(values.keys() - known):
        name = unknown[0]
        if is_prompt and name in _FIELDS:
            raise BadLine(f"{name} goes with messages, and the line has a prompt", param=name)
        allowed = ", ".join(sorted(known))
        hint = did_you_mean(name, known) or f"; the fields are {allowed}"
        raise BadLine(f"unknown field {name!r}{hint}", param=name)


def prepare_reply(replies: Replies, values: Mapping[str, Any], sampling: SamplingParams) -> Prepared:
    """The reply to a line's messages. Raises a leaf of InvalidRequest."""
    fields = {name: value for name, value in values.items() if name in _FIELDS and value is not None}
    for name, value in fields.items():
        kind = _FIELDS[name]
        if not isinstance(value, kind):
            raise BadLine(f"{name} must be {_NAMES[kind]}", param=name)
    template = fields.get("chat_template")
    if template is not None and "{" in template:
        message = "chat_template must be the name of one of the model's; `--chat-template FILE` gives another"
        raise BadLine(message, param="chat_template")
    rendering = {name: fields[name] for name in _RENDERING if name in fields}
    if "chat_template_kwargs" in rendering:
        rendering["variables"] = rendering.pop("chat_template_kwargs")
    tools = fields.get("tools")
    wish = _wish(tools or [], fields)
    return replies.prepare(
        fields["messages"],
        lambda room: sampling,
        tools=None if fields.get("tool_choice") == "none" else tools,
        wish=wish,
        chat_template=template,
        **rendering,
    )


def message_fields(reply: Prepared, result: GenerationResult, *, call_id: str) -> dict[str, Any]:
    """A choice's `message`, in OpenAI's form, and its finish reason.

    The calls' ids begin with `call_id`: random ones would make the records of two runs differ.
    """
    parser = ReplyParser(reply.plan.read, reply.plan.offered)
    whole = whole_reply([*parser.feed(result.text), *parser.finish()])
    message: dict[str, Any] = {"role": "assistant", "content": whole.content}
    if whole.reasoning is not None:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id}{i:04x}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(whole.calls)
        ]
    is_call = bool(whole.calls) and result.finish_reason is FinishReason.STOP
    return {"message": message, "finish_reason": "tool_calls" if is_call else result.finish_reason}


def _wish(tools: list[Any], fields: Mapping[str, Any]) -> ToolWish:
    """Decide which of the tools may and must be called."""
    offered = check_tools(tools)
    choice = fields.get("tool_choice", "auto")
    parallel = fields.get("parallel_tool_calls", True)
    if choice == "none" or (choice == "auto" and not tools):
        return NO_TOOLS
    if choice == "auto":
        return ToolWish(tools=offered, parallel=parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    wanted = offered if choice == "required" else [tool for tool in offered if tool.name == name]
    if not wanted:
        message = 'tool_choice must be "none", "auto", "required" (with tools), or {"type": "function", '
        raise BadLine(message + '"function": {"name": one of the tools}}', param="tool_choice")
    return ToolWish(tools=wanted, must_call=True, parallel=parallel and choice == "required")
