"""`POST /v1/chat/completions`: a conversation goes on with the assistant's answer."""

import time

from fastapi import APIRouter, Request, Response

from server.http.chat_protocol import AnswerMessage, ChatChoice, ChatCompletion, ChatCompletionRequest
from server.http.choices import Choices, new_response_id
from server.http.chunks import CHAT_CHUNK
from server.http.conversation import text_of
from server.http.generation import Answer, answers, respond
from server.http.json_body import JsonRoute
from server.http.not_built import refuse_what_is_not_built
from server.http.prompts import beside, check, check_number
from server.http.protocol import named
from server.http.state import FactsOf, GatewayOf, OptionsOf

router = APIRouter(tags=["generation"], route_class=JsonRoute)


@router.post("/v1/chat/completions", response_model=None, responses=answers(ChatCompletion))
async def chat(
    request: Request, gateway: GatewayOf, options: OptionsOf, facts: FactsOf, body: ChatCompletionRequest
) -> Response:
    """Answer the conversation `n` times, each as long as the model allows unless `max_tokens` says less."""
    refuse_what_is_not_built(body)
    body.check_stream_options()
    model = gateway.model(body.model)
    facts["user"] = body.user
    check_number(1, body.n_choices, options)
    wanted = body.wanted_tokens
    body.sampling(max_tokens=1 if wanted is None else wanted)  # refuses, before the work of encoding
    text = await text_of(model, body.messages)
    prompt_ids = await beside(
        len(text), lambda: model.encode(text, param="messages", add_special_tokens=False)
    )
    # A prompt that leaves no room for an answer is refused below, whatever it asks for.
    most = max(model.service.most_output(len(prompt_ids)), 1)
    sampling = body.sampling(max_tokens=most if wanted is None else wanted)
    with named(max_tokens=body.max_tokens_field, prompt="messages"):
        check(model, [prompt_ids], sampling)
    choices = Choices(
        gateway,
        [prompt_ids],
        sampling,
        body.n_choices,
        response_id=new_response_id("chatcmpl"),
        facts=facts,
    )
    answer = Answer(choices, model, created=int(time.time()), shape=CHAT_CHUNK)

    def whole(texts: list[str]) -> ChatCompletion:
        return ChatCompletion(
            **answer.head,
            choices=[
                ChatChoice(
                    index=i,
                    message=AnswerMessage(content=text),
                    finish_reason=choices.tally.complete(i),
                )
                for i, text in enumerate(texts)
            ],
            usage=choices.tally.usage(),
        )

    return await respond(answer, body, request.receive, whole)
