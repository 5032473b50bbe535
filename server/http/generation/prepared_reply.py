"""Prepares a reply to a conversation, in any protocol: from the messages to a checked prompt."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from orca_jax.errors import NotSupported
from orca_jax.request.chat.chat_template import ChatTemplate
from orca_jax.request.chat.conversation import prompt_text, reads_effort
from orca_jax.request.chat.tools import ToolWish, check_tools
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.reply.reply_plan import ReplyPlan, plan_reply
from server.gateway.served_model import ServedModel, template_for
from server.gateway.side_threads import run_for_request
from server.http.fields.conversation import ChatMessage, ConversationFields
from server.http.fields.generation import renamed_fields
from server.http.fields.strict import Unused
from server.http.generation.answer import check
from server.http.state import ApiCall


def rendered(
    template: ChatTemplate,
    conversation: ConversationFields,
    *,
    use_tools: bool = True,
    reasoning_effort: str | None = None,
) -> str:
    """Render a conversation as the prompt's text, special tokens included; its tools only with `use_tools`.

    Raises InvalidRequest and its subclasses BadConversation and NotSupported. Call it in `run_for_request`:
    its cost grows with the messages.
    """
    if not use_tools:  # `prompt_text` checks only the tools that it renders
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
    """The message as JSON values, without nulls except inside the arguments of tool calls."""
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


class PromptRequest(Protocol):
    """A protocol's request, as far as the prompt depends on it besides the conversation."""

    @property
    def client_names(self) -> Mapping[str, str]:
        """The client's names of fields; see `renamed_fields`."""
        ...

    @property
    def uses_tools(self) -> bool:
        """Whether the prompt shows the conversation's tools."""
        ...

    @property
    def effort(self) -> str | None:
        """The requested reasoning effort."""
        ...


class ReplyRequest(PromptRequest, Protocol):
    """A protocol's request for a reply. The cost of its methods may grow with the request."""

    @property
    def scheduling(self) -> SchedulingParams:
        """Priority and cache salt."""
        ...

    def wish(self, tools: Sequence[dict[str, Any]]) -> ToolWish:
        """The tools of the conversation that may and must be called. Raises InvalidRequest."""
        ...

    def sampling(self, defaults: GenerationDefaults, *, longest: int) -> SamplingParams:
        """The sampling parameters of a reply of up to `longest` tokens, below 1 if the prompt leaves no room.

        Raises a subclass of InvalidRequest.
        """
        ...


class PreparedReply(NamedTuple):
    """The prompt, the rules for the output, and how the output is parsed."""

    prompt: CheckedPrompt
    rules: OutputRules
    plan: ReplyPlan


def prompt_of(
    model: ServedModel, body: PromptRequest, conversation: ConversationFields, unused: Unused
) -> tuple[str, list[int]]:
    """The prompt's text and tokens. `unused` gets the reasoning effort if the chat template does not read it.

    Raises NotSupported and other subclasses of InvalidRequest. Call it in `run_for_request`: its cost grows
    with the messages.
    """
    if model.has_encoder:
        message = "this model reads a prompt with its encoder and knows no conversations; use /v1/completions"
        raise NotSupported(message, param="messages")
    has_tools = body.uses_tools and bool(conversation.tools)
    template = template_for(model, conversation.chat_template, has_tools=has_tools)
    effort = body.effort
    if effort is not None and not reads_effort(template, effort):
        field = body.client_names.get("reasoning_effort", "reasoning_effort")
        unused.note(field, f"it is {effort[:80]!r}, and the model's chat template does not read it")
        effort = None
    text = rendered(template, conversation, use_tools=body.uses_tools, reasoning_effort=effort)
    # The chat template writes the special tokens, so by default the tokenizer does not add any.
    special = bool(conversation.add_special_tokens)
    return text, model.encode(text, param="messages", add_special_tokens=special)


async def prepared(
    call: ApiCall,
    model: ServedModel,
    body: ReplyRequest,
    conversation: Callable[[], ConversationFields],
    *,
    n_earlier_bytes: int = 0,
) -> PreparedReply:
    """Turn a request for a reply into a checked prompt and the rules for the output.

    `conversation` may raise a subclass of InvalidRequest, and its cost may grow with the request and with
    `n_earlier_bytes`, the part of the conversation that the server had stored.

    Raises a subclass of InvalidRequest, or QueueFull.
    """
    service, n_bytes = model.service, call.n_bytes + n_earlier_bytes

    def read() -> tuple[SamplingParams, list[int], ReplyPlan]:
        # Invalid parameters are rejected before the expensive work.
        sampling = body.sampling(model.defaults, longest=service.most_output(1))
        messages = conversation()
        wish = body.wish(messages.tools or ())
        text, prompt = prompt_of(model, body, messages, call.unused)
        longest = service.most_output(len(prompt))
        if sampling.max_tokens > longest:  # a limit that the prompt leaves room for stays as it is
            sampling = body.sampling(model.defaults, longest=longest)
        return sampling, prompt, plan_reply(model, text, sampling, wish)

    with renamed_fields(**body.client_names):
        sampling, prompt, plan = await run_for_request(n_bytes, read)
        rules = await call.gateway.compiler.rules(model, sampling, plan.form, plan.loose_form)
        work = partial(check, model, [prompt], rules, body.scheduling, call.tenant)
        (checked,) = await run_for_request(n_bytes, work)
    return PreparedReply(checked, rules, plan)
