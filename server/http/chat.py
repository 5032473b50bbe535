"""`POST /v1/chat/completions`: a conversation becomes a prompt, and what the model says is the answer."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from server.beside import beside
from server.http.answer import GENERATION_ERRORS, accept, answer, new_response_id
from server.http.chat_protocol import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from server.http.choices import Choices
from server.http.chunks import CHAT_CHUNK
from server.http.conversation import text_of
from server.http.json_body import JsonRoute
from server.http.prompts import check, check_number
from server.http.protocol import named
from server.http.state import FactsOf, GatewayOf, OptionsOf

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, gateway: GatewayOf, options: OptionsOf, facts: FactsOf
) -> Response:
    """Answer a conversation, at once or, with `stream`, piece by piece."""
    model = accept(body, gateway, facts)
    wanted = body.wanted_tokens
    body.sampling(max_tokens=1 if wanted is None else wanted)  # what is wrong there comes before the work
    check_number(1, body.n_choices, options, model)
    text = await text_of(model, body.messages)
    # The template writes the special tokens that belong into a conversation, so no others are added.
    encode = partial(model.encode, text, param="messages", add_special_tokens=False)
    prompt = await beside(len(text), encode)
    longest = max(model.service.most_output(len(prompt)), 1)  # where that is too long, `check` says so
    sampling = body.sampling(max_tokens=longest if wanted is None else wanted)
    with named(prompt="messages", max_tokens=body.max_tokens_field):
        check(model, [prompt], sampling)
    response_id = new_response_id("chatcmpl")
    choices = Choices(gateway, [prompt], sampling, body.n_choices, response_id=response_id, facts=facts)
    return await answer(body, model, choices, request.receive, shape=CHAT_CHUNK, finished=_completion)


def _completion(head: dict[str, Any], choices: Choices, texts: list[str]) -> ChatCompletion:
    listed = [
        ChatChoice(index=i, message=AnswerMessage(content=text), finish_reason=choices.tally.complete(i))
        for i, text in enumerate(texts)
    ]
    return ChatCompletion(**head, choices=listed, usage=choices.tally.usage())
