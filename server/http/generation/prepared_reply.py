"""A reply to a conversation, in whatever protocol it is asked for: from the messages to a checked prompt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from orca_jax.errors import NotSupported
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request
from server.http.fields.conversation import ConversationFields
from server.http.fields.generation import renamed_fields
from server.http.generation.answer import check
from server.http.generation.conversation import text_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRequest:
    """What a protocol's request asks for.

    `conversation` and `sampling` may raise a subclass of InvalidRequest; their cost may grow with the
    request. `sampling` takes how many tokens the reply may have at most, 0 or less if the prompt leaves no
    room. `names` are the client's names of fields, see `renamed_fields`.
    """

    conversation: Callable[[], ConversationFields]
    sampling: Callable[[int], SamplingParams]
    scheduling: SchedulingParams
    use_tools: bool = True
    names: Mapping[str, str] = field(default_factory=dict[str, str])


def prompt_ids(model: ServedModel, conversation: ConversationFields, *, use_tools: bool = True) -> list[int]:
    """The conversation's tokens. Call it in `run_for_request`: its cost grows with the messages.

    Raises NotSupported and other subclasses of InvalidRequest.
    """
    if model.has_encoder:
        message = "this model reads a prompt with its encoder and knows no conversations; use /v1/completions"
        raise NotSupported(message, param="messages")
    text = text_of(model, conversation, use_tools=use_tools)
    # The chat template writes the special tokens, so by default the tokenizer does not add any.
    special = bool(conversation.add_special_tokens)
    return model.encode(text, param="messages", add_special_tokens=special)


async def prepared(
    gateway: Gateway, model: ServedModel, asked: ReplyRequest, *, n_bytes: int, tenant: str
) -> tuple[CheckedPrompt, OutputRules]:
    """The prompt and the output's rules. `n_bytes` are what the conversation takes.

    Raises a subclass of InvalidRequest, or QueueFull.
    """
    service = model.service

    def read() -> tuple[SamplingParams, list[int]]:
        asked.sampling(service.most_output(1))  # reject invalid parameters before the expensive work
        prompt = prompt_ids(model, asked.conversation(), use_tools=asked.use_tools)
        return asked.sampling(service.most_output(len(prompt))), prompt

    with renamed_fields(**asked.names):
        sampling, prompt = await run_for_request(n_bytes, read)
        rules = await gateway.compiler.rules(model, sampling)
        work = partial(check, model, [prompt], rules, asked.scheduling, tenant)
        (checked,) = await run_for_request(n_bytes, work)
    return checked, rules
