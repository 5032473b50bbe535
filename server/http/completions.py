"""`POST /v1/completions`: the model goes on where a prompt ends."""

from typing import Any

from fastapi import APIRouter, Request, Response

from server.http.answer import GENERATION_ERRORS, accept, answer, new_response_id
from server.http.choices import Choices
from server.http.chunks import TEXT_CHUNK
from server.http.completion_protocol import Completion, CompletionChoice, CompletionRequest
from server.http.json_body import JsonRoute
from server.http.prompts import check, check_number, encode
from server.http.protocol import named
from server.http.state import FactsOf, GatewayOf, OptionsOf

router = APIRouter(route_class=JsonRoute, tags=["generation"])

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: {"model": Completion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_completion(
    body: CompletionRequest, request: Request, gateway: GatewayOf, options: OptionsOf, facts: FactsOf
) -> Response:
    """Continue one prompt or many, at once or, with `stream`, piece by piece."""
    model = accept(body, gateway, facts)
    wanted = body.wanted_tokens
    sampling = body.sampling(max_tokens=_DEFAULT_MAX_TOKENS if wanted is None else wanted)
    check_number(len(body.prompts), body.n_choices, options, model)
    prompts = await encode(model, body.prompts)
    with named(max_tokens=body.max_tokens_field):
        check(model, prompts, sampling)
    response_id = new_response_id("cmpl")
    choices = Choices(gateway, prompts, sampling, body.n_choices, response_id=response_id, facts=facts)
    return await answer(body, model, choices, request.receive, shape=TEXT_CHUNK, finished=_completion)


def _completion(head: dict[str, Any], choices: Choices, texts: list[str]) -> Completion:
    listed = [
        CompletionChoice(index=i, text=text, finish_reason=choices.tally.complete(i))
        for i, text in enumerate(texts)
    ]
    return Completion(**head, choices=listed, usage=choices.tally.usage())
