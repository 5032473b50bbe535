"""Converts Anthropic's messages to the messages that the chat template renders."""

from typing import Any

from orca_jax.errors import InvalidRequest
from server.gateway.served_model import ServedModel
from server.http.fields.conversation import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ConversationFields,
    ToolCall,
)
from server.http.fields.strict import Unused
from server.http.messages.fields import (
    InputMessage,
    PromptFields,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    texts_of,
)

# Variables of chat templates that switch reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")


def conversation_of(body: PromptFields, model: ServedModel, unused: Unused) -> ConversationFields:
    """Convert the conversation. `unused` gets `thinking` if the model has no switch for it.

    Raises InvalidRequest, which names the field, and NotSupported.
    """
    messages = list[ChatMessage]()
    if body.system is not None:
        messages.append(_message("system", texts_of(body.system)))
    called = set[str]()
    for index, message in enumerate(body.messages):
        _add(messages, message, f"messages.{index}", called)
    if not messages:
        raise InvalidRequest("messages has nothing that the model reads; add a text", param="messages")
    if messages[-1].tool_calls:
        text = "the last message has a tool_use; add a user's message with its tool_result"
        raise InvalidRequest(text, param=f"messages.{len(body.messages) - 1}")
    tools = [tool.for_chat() for tool in body.tools or () if isinstance(tool, Tool)]
    has_tools = bool(tools) and body.uses_tools
    return ConversationFields(
        messages=messages,
        tools=tools or None,
        continue_final_message=messages[-1].role == "assistant" or None,
        chat_template_kwargs=_variables(body.thinking, model, unused, has_tools=has_tools),
    )


def _variables(
    thinking: Thinking | None, model: ServedModel, unused: Unused, *, has_tools: bool
) -> dict[str, Any] | None:
    templates = model.chat_template
    if thinking is None or templates is None:  # without a template every conversation is refused
        return None
    template = templates.choose(None, has_tools=has_tools)
    switch = next((name for name in _SWITCHES if template.reads(name)), None)
    wanted = thinking.type != "disabled"
    if switch is None:
        if wanted and model.reasoning_format is None:  # with a reasoning format it always reasons
            unused.note("thinking", f"it is {thinking.type!r}, and the model's chat template has no choice")
        return None
    return {switch: wanted}


def _add(messages: list[ChatMessage], message: InputMessage, path: str, called: set[str]) -> None:
    """Add a message; tool results become separate messages, and consecutive messages of one role are joined.

    `called` holds the ids of the calls in the assistant's last message.
    """
    content = message.content
    blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    texts, thinking, calls = list[str](), list[str](), list[ToolCall]()
    for i, block in enumerate(blocks):
        where = f"{path}.content.{i}"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                _check_role(message, "assistant", where)
                thinking.append(block.thinking)
            case ToolUseBlock():
                _check_role(message, "assistant", where)
                function = CalledFunction(name=block.name, arguments=block.input)
                calls.append(ToolCall(id=block.id, function=function))
            case ToolResultBlock():
                _check_role(message, "user", where)
                if block.tool_use_id not in called:
                    text = (
                        f"{where}.tool_use_id is {block.tool_use_id[:80]!r}; the assistant's message before "
                    )
                    raise InvalidRequest(f"{text}has no tool_use of that id", param=f"{where}.tool_use_id")
                messages.append(_result(block))
            case _:
                pass  # a block that is left out; unknown ones have been refused
    if message.role == "assistant":
        called.clear()
        called.update(call.id or "" for call in calls)
    if not texts and not thinking and not calls and blocks:
        return
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role and not (last.tool_calls or calls or thinking):
        merged: Any = "\n".join([*texts_of(last.content), *texts])
        last.content = merged
        return
    chat = _message(message.role, texts, tool_calls=calls or None)
    chat.reasoning_content = "".join(thinking) or None
    messages.append(chat)


def _result(block: ToolResultBlock) -> ChatMessage:
    text = "\n".join(texts_of(block.content))
    return _message("tool", [f"Error: {text}" if block.is_error else text], tool_call_id=block.tool_use_id)


def _check_role(message: InputMessage, role: str, where: str) -> None:
    if message.role != role:
        text = f"{where} is not for the role {message.role}; it goes into a message of the role {role}"
        raise InvalidRequest(text, param=where)


def _message(role: str, texts: list[str], **fields: Any) -> ChatMessage:
    content: Any = texts[0] if len(texts) == 1 else _parts(texts)
    if not texts and fields.get("tool_calls"):
        content = None
    return ChatMessage(role=role, content=content, **fields)  # pyright: ignore[reportArgumentType]


def _parts(texts: list[str]) -> Any:
    return [ContentPart(type="text", text=text) for text in texts]
