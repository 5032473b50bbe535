"""`POST /v1/completions`: the model goes on where a prompt ends."""

from typing import Any

from fastapi import APIRouter, Request, Response

from orca_jax.request.sampling_params import SamplingParams
from server.gateway.side_threads import run_for_request
from server.http.bodies.json_body import JsonRoute
from server.http.fields.client_names import named
from server.http.fields.completions import Completion, CompletionRequest
from server.http.fields.logprobs import completion_logprobs
from server.http.fields.token_names import TokenNames
from server.http.generation.answer import GENERATION_ERRORS, accept, answer, new_response_id
from server.http.generation.choice_output import Telling
from server.http.generation.choices import Choices, Whole
from server.http.generation.chunks import TEXT_CHUNK
from server.http.generation.prompts import check, check_number, encode, texts
from server.http.generation.state import FactsOf, GatewayOf, OptionsOf, OwnerOf

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: {"model": Completion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_completion(
    body: CompletionRequest,
    request: Request,
    gateway: GatewayOf,
    options: OptionsOf,
    owner: OwnerOf,
    facts: FactsOf,
) -> Response:
    """Continue one prompt or many, at once or, with `stream`, piece by piece."""
    model = accept(body, gateway, facts)
    n_bytes = len(await request.body())

    def read() -> tuple[SamplingParams, list[tuple[int, ...]]]:
        sampling = body.sampling()
        check_number(len(body.prompts), body.n_choices, options, model)
        return sampling, encode(model, body.prompts)

    def look_through() -> list[str] | None:
        check(model, prompts, rules)
        return texts(model, body.prompts) if body.echo else None

    with named(**body.client_names):
        sampling, prompts = await run_for_request(n_bytes, read)
        rules = await gateway.compiler.rules(model, sampling)
        prompt_texts = await run_for_request(n_bytes, look_through)
    telling = None
    if body.echo or body.logprobs is not None:
        telling = Telling(
            names=TokenNames(model.tokenizer),
            logprobs=None if body.logprobs is None else completion_logprobs,
            prompts=prompt_texts,
            only_prompts=body.only_prompt,
        )
    response_id = new_response_id("cmpl")
    choices = Choices(
        gateway, prompts, rules, telling=telling, response_id=response_id, owner=owner, facts=facts
    )
    return await answer(
        body,
        model,
        choices,
        request.receive,
        shape=TEXT_CHUNK,
        object_name="text_completion",
        finished=_choices,
    )


def _choices(choices: Choices, wholes: list[Whole]) -> list[dict[str, Any]]:
    """As CompletionChoice."""
    return [
        {
            "index": i,
            "text": text,
            "logprobs": choices.logprobs(tokens),
            "finish_reason": choices.tally.complete(i),
        }
        for i, (text, tokens) in enumerate(wholes)
    ]
