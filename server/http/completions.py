"""`POST /v1/completions`: prompts go on as the model has it."""

import time

from fastapi import APIRouter, Request, Response

from server.http.choices import Choices, new_response_id
from server.http.chunks import TEXT_CHUNK
from server.http.completion_protocol import Completion, CompletionChoice, CompletionRequest
from server.http.generation import Answer, answers, respond
from server.http.json_body import JsonRoute
from server.http.not_built import refuse_what_is_not_built
from server.http.prompts import check, check_number, encode
from server.http.protocol import named
from server.http.state import FactsOf, GatewayOf, OptionsOf

_MAX_TOKENS = 16  # OpenAI's default

router = APIRouter(tags=["generation"], route_class=JsonRoute)


@router.post("/v1/completions", response_model=None, responses=answers(Completion))
async def complete(
    request: Request, gateway: GatewayOf, options: OptionsOf, facts: FactsOf, body: CompletionRequest
) -> Response:
    """Continue each prompt `n` times."""
    refuse_what_is_not_built(body)
    body.check_stream_options()
    model = gateway.model(body.model)
    facts["user"] = body.user
    prompts = body.prompts
    check_number(len(prompts), body.n_choices, options)
    wanted = body.wanted_tokens
    sampling = body.sampling(max_tokens=_MAX_TOKENS if wanted is None else wanted)
    prompt_ids = await encode(model, prompts)
    with named(max_tokens=body.max_tokens_field):
        check(model, prompt_ids, sampling)
    choices = Choices(
        gateway,
        prompt_ids,
        sampling,
        body.n_choices,
        response_id=new_response_id("cmpl"),
        facts=facts,
    )
    answer = Answer(choices, model, created=int(time.time()), shape=TEXT_CHUNK)

    def whole(texts: list[str]) -> Completion:
        return Completion(
            **answer.head,
            choices=[
                CompletionChoice(index=i, text=text, finish_reason=choices.tally.complete(i))
                for i, text in enumerate(texts)
            ],
            usage=choices.tally.usage(),
        )

    return await respond(answer, body, request.receive, whole)
