"""`POST /v1/chat/completions`: the model replies to a conversation."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from orca_jax.request.sampling_params import SamplingParams
from server.gateway.side_threads import run_for_request
from server.http.bodies.json_body import JsonRoute
from server.http.fields.chat import ChatCompletion, ChatCompletionRequest
from server.http.fields.client_names import renamed_fields
from server.http.fields.logprobs import chat_logprobs
from server.http.fields.token_names import TokenNames
from server.http.generation.answer import GENERATION_ERRORS, accept, answer, new_response_id
from server.http.generation.choice_output import OutputExtras
from server.http.generation.choices import Choices, CompleteChoice
from server.http.generation.chunks import CHAT_CHUNK
from server.http.generation.conversation import text_of
from server.http.generation.prompts import check, check_number
from server.http.generation.state import FactsOf, GatewayOf, OptionsOf, OwnerOf

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_chat_completion(
    body: ChatCompletionRequest,
    request: Request,
    gateway: GatewayOf,
    options: OptionsOf,
    owner: OwnerOf,
    facts: FactsOf,
) -> Response:
    """Reply to a conversation, in one response or, with `stream`, as server-sent events."""
    model = accept(body, gateway, facts)
    service = model.service
    n_bytes = len(await request.body())

    def read() -> tuple[SamplingParams, list[int]]:
        body.sampling(
            model.defaults, longest=service.most_output(1)
        )  # reject invalid parameters before the expensive work
        check_number(1, body.n_choices, options, model)
        text = text_of(model, body, use_tools=body.tool_choice != "none")
        # The chat template writes the special tokens, so by default the tokenizer does not add any.
        prompt = model.encode(text, param="messages", add_special_tokens=bool(body.add_special_tokens))
        longest = service.most_output(len(prompt))
        if longest < 1:  # `check` below rejects the prompt
            longest = max(body.min_tokens or 0, 1)
        return body.sampling(model.defaults, longest=longest), prompt

    with renamed_fields(**body.client_names):
        sampling, prompt = await run_for_request(n_bytes, read)
        rules = await gateway.compiler.rules(model, sampling)
        checked = await run_for_request(n_bytes, partial(check, model, [prompt], rules))
    extras = None
    if body.logprobs:
        extras = OutputExtras(names=TokenNames(model.tokenizer), write_logprobs=chat_logprobs)
    response_id = new_response_id("chatcmpl")
    choices = Choices(
        gateway, checked, rules, extras=extras, response_id=response_id, owner=owner, facts=facts
    )
    return await answer(
        body,
        model,
        choices,
        request.receive,
        shape=CHAT_CHUNK,
        object_name="chat.completion",
        write_choices=_choices,
    )


def _choices(choices: Choices, complete: list[CompleteChoice]) -> list[dict[str, Any]]:
    """In the form of ChatChoice."""
    return [
        {
            "index": i,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": choices.logprobs(tokens),
            "finish_reason": choices.tally.finish_reason(i),
        }
        for i, (text, tokens) in enumerate(complete)
    ]
