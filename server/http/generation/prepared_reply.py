"""A reply to a conversation, in whatever protocol it is asked for: from the messages to a checked prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from orca_jax.errors import NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate, Templates
from orca_jax.request.chat.conversation import prompt_text, reads_effort
from orca_jax.request.chat.tools import ToolWish, check_tools
from orca_jax.request.checked_prompt import CheckedPrompt
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.prepared_params import OutputRules
from server.gateway.reply.reply_plan import ReplyPlan, plan_reply, reply_rules
from server.gateway.served_model import ServedModel, template_for
from server.gateway.side_threads import run_for_request
from server.http.fields.conversation import ChatMessage, ConversationFields
from server.http.fields.generation import renamed_fields
from server.http.fields.strict import Unused
from server.http.generation.answer import check
from server.http.generation.state import ApiCall


def text_of(
    model: ServedModel,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt text of a conversation, special tokens included; without `use_tools` its tools are left out.

    `reasoning_effort` is a variable of some templates, and refused for the others.

    Raises NotSupported, InvalidRequest and its subclass BadConversation. Call it in `run_for_request`: its
    cost grows with the messages.
    """
    has_tools = use_tools and bool(conversation.tools)
    template = template_for(model, conversation.chat_template, has_tools=has_tools)
    return _rendered(template, conversation, use_tools, reasoning_effort)


def rendered(
    templates: Templates,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """The text of a conversation. Raises InvalidRequest, of which BadConversation and NotSupported."""
    has_tools = use_tools and bool(conversation.tools)
    template = templates.choose(conversation.chat_template, has_tools=has_tools)
    return _rendered(template, conversation, use_tools, reasoning_effort)


def _rendered(
    template: ChatTemplate, conversation: ConversationFields, use_tools: bool, reasoning_effort: str | None
) -> str:
    if not use_tools:  # `prompt_text` checks those that it gets
        check_tools(conversation.tools or ())
    return prompt_text(
        template,
        [_as_json(message) for message in conversation.messages],
        tools=conversation.tools if use_tools else None,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=bool(conversation.continue_final_message),
        reasoning_effort=reasoning_effort,
        variables=conversation.chat_template_kwargs,
    )


def _as_json(message: ChatMessage) -> dict[str, Any]:
    """The message as parsed JSON; values in the arguments of tool calls are kept as they are, also null."""
    plain = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    content: str | list[Any] | None = message.content
    if isinstance(content, list):
        content = [part.model_dump(exclude_none=True) for part in content]
    plain["content"] = content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                **call.model_dump(exclude_none=True, exclude={"function"}),
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRequest:
    """What a protocol's request asks for.

    The functions may raise a subclass of InvalidRequest; their cost may grow with the request. `sampling`
    takes how many tokens the reply may have at most, 0 or less if the prompt leaves no room; `wish` takes the
    conversation's tools. Without `use_tools` the prompt has none. `effort` is that of the model's reasoning,
    which the call's `unused` names if the chat template does not read it.
    `names` are the client's names of fields, see `renamed_fields`.
    """

    conversation: Callable[[], ConversationFields]
    sampling: Callable[[int], SamplingParams]
    scheduling: SchedulingParams
    wish: Callable[[Sequence[dict[str, Any]]], ToolWish]
    use_tools: bool = True
    effort: str | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])


class PreparedReply(NamedTuple):
    """The prompt, the output's rules, and how the output is read."""

    prompt: CheckedPrompt
    rules: OutputRules
    plan: ReplyPlan


def prompt_of(
    model: ServedModel,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    effort: str | None = None,
    names: Mapping[str, str],
    unused: Unused,
) -> tuple[str, list[int]]:
    """The conversation's text and tokens. Call it in `run_for_request`: its cost grows with the messages.

    Raises NotSupported and other subclasses of InvalidRequest.
    """
    if model.has_encoder:
        message = "this model reads a prompt with its encoder and knows no conversations; use /v1/completions"
        raise NotSupported(message, param="messages")
    has_tools = use_tools and bool(conversation.tools)
    template = template_for(model, conversation.chat_template, has_tools=has_tools)
    if effort is not None and not reads_effort(template, effort):
        field = names.get("reasoning_effort", "reasoning_effort")
        unused.note(field, f"it is {effort[:80]!r}, and the model's chat template does not read it")
        effort = None
    text = text_of(model, conversation, use_tools=use_tools, reasoning_effort=effort)
    # The chat template writes the special tokens, so by default the tokenizer does not add any.
    special = bool(conversation.add_special_tokens)
    return text, model.encode(text, param="messages", add_special_tokens=special)


async def prepared(
    call: ApiCall, model: ServedModel, asked: ReplyRequest, *, n_earlier_bytes: int = 0
) -> PreparedReply:
    """What the reply is generated from. `n_earlier_bytes` of the conversation are not in the request.

    Raises a subclass of InvalidRequest, or QueueFull.
    """
    service, n_bytes = model.service, call.n_bytes + n_earlier_bytes

    def read() -> tuple[SamplingParams, list[int], ReplyPlan]:
        asked.sampling(service.most_output(1))  # reject invalid parameters before the expensive work
        conversation = asked.conversation()
        wish = asked.wish(conversation.tools or ())
        text, prompt = prompt_of(
            model,
            conversation,
            use_tools=asked.use_tools,
            effort=asked.effort,
            names=asked.names,
            unused=call.unused,
        )
        sampling = asked.sampling(service.most_output(len(prompt)))
        return sampling, prompt, plan_reply(model, text, sampling, wish)

    with renamed_fields(**asked.names):
        sampling, prompt, plan = await run_for_request(n_bytes, read)
        rules = await reply_rules(call.gateway, model, sampling, plan)
        work = partial(check, model, [prompt], rules, asked.scheduling, call.tenant)
        (checked,) = await run_for_request(n_bytes, work)
    return PreparedReply(checked, rules, plan)
