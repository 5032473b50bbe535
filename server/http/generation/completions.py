"""`POST /v1/completions`: the model continues a prompt."""

from typing import Any

from fastapi import APIRouter, Request, Response

from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from server.gateway.side_threads import run_for_request
from server.http.bodies.json_body import JsonRoute
from server.http.fields.client_names import renamed_fields
from server.http.fields.completions import Completion, CompletionRequest
from server.http.fields.logprobs import completion_logprobs
from server.http.fields.token_names import TokenNames
from server.http.generation.answer import GENERATION_ERRORS, accept, answer, new_response_id
from server.http.generation.choice_output import OutputExtras
from server.http.generation.choices import Choices, CompleteChoice
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
    """Continue one or more prompts, in one response or, with `stream`, as server-sent events."""
    model = accept(body, gateway, facts)
    n_bytes = len(await request.body())

    def read() -> tuple[SamplingParams, list[list[int]]]:
        sampling = body.sampling(model.defaults)
        check_number(len(body.prompts), body.n_choices, options, model)
        return sampling, encode(model, body.prompts)

    def check_prompts() -> tuple[list[CheckedPrompt], list[str] | None]:
        return check(model, prompts, rules), texts(model, body.prompts) if body.echo else None

    with renamed_fields(**body.client_names):
        sampling, prompts = await run_for_request(n_bytes, read)
        rules = await gateway.compiler.rules(model, sampling)
        checked, prompt_texts = await run_for_request(n_bytes, check_prompts)
    extras = None
    if body.echo or body.logprobs is not None:
        extras = OutputExtras(
            names=TokenNames(model.tokenizer),
            write_logprobs=None if body.logprobs is None else completion_logprobs,
            prompts=prompt_texts,
            only_prompts=body.only_prompt,
        )
    response_id = new_response_id("cmpl")
    choices = Choices(
        gateway, checked, rules, extras=extras, response_id=response_id, owner=owner, facts=facts
    )
    return await answer(
        body,
        model,
        choices,
        request.receive,
        shape=TEXT_CHUNK,
        object_name="text_completion",
        write_choices=_choices,
    )


def _choices(choices: Choices, complete: list[CompleteChoice]) -> list[dict[str, Any]]:
    """In the form of CompletionChoice."""
    return [
        {
            "index": i,
            "text": text,
            "logprobs": choices.logprobs(tokens),
            "finish_reason": choices.tally.finish_reason(i),
        }
        for i, (text, tokens) in enumerate(complete)
    ]
