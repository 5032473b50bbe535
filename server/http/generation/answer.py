"""Shared by the generating routes: ids, checks of prompts, and the response of chat and completions."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive

import orca_jax
from orca_jax.errors import InvalidPrompt, InvalidRequest
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.random_ids import random_id
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import error_responses
from server.http.bodies.json_text import as_json_bytes
from server.http.fields.generation import GenerationRequest, StreamOptions
from server.http.fields.logprobs import n_characters
from server.http.generation.choices import Choices, CompleteChoice
from server.http.generation.chunks import ChunkWriter, ReplyForm
from server.http.generation.offering_reply import OfferingReply
from server.http.generation.reply_stream import ReplyStream
from server.settings.endpoint_options import EndpointOptions

T = TypeVar("T")
R = TypeVar("R")

GENERATION_ERRORS = error_responses(404, 429, 500, 503, 504)


def new_response_id(prefix: str) -> str:
    """A unique response id. The ids of its requests in the service are derived from it."""
    return f"{prefix}-{random_id()}"


def new_id(prefix: str) -> str:
    """A unique id in the form of the newer protocols, such as `msg_...`."""
    return f"{prefix}_{random_id()}"


def check(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    rules: OutputRules,
    scheduling: SchedulingParams,
    tenant: str,
    decoder_ids: Sequence[int] | None = None,
) -> list[CheckedPrompt]:
    """Check all prompts before any is submitted. Raises a leaf of InvalidRequest.

    Call it in `run_for_request`: its cost grows with the prompts' length.
    """
    check_one = partial(
        model.service.check,
        rules=rules,
        scheduling=model.scheduled(scheduling),
        tenant=tenant,
        decoder_ids=decoder_ids,
    )
    return each(prompts, check_one)


def check_number(n_prompts: int, n: int, options: EndpointOptions, model: ServedModel) -> None:
    """Raise InvalidRequest if a request has no prompt, or asks for too many choices (`n` for each prompt).

    All choices are submitted together, so they must fit into one owner's share of an empty queue.
    """
    if not n_prompts:
        raise InvalidPrompt("prompt is an empty list; give at least one", param="prompt")
    most = min(options.max_choices, model.service.max_each)
    if n_prompts * n > most:
        count = f"{n} for each of {n_prompts} prompts" if n_prompts > 1 else f"n is {n}"
        message = f"too many choices ({count}); one request may ask for {most} in all"
        raise InvalidRequest(message, param="n" if n > 1 else "prompt")


async def answer(
    body: GenerationRequest, model: ServedModel, choices: Choices, receive: Receive, form: ReplyForm
) -> Response:
    """Generate the choices and respond: with a stream, or with one JSON object when all are complete."""
    head = {
        "id": choices.response_id,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": f"orca_jax-{orca_jax.__version__}",
    }
    if body.stream:
        options = body.stream_options or StreamOptions()
        has_text, versions = model.tokenizer is not None, model.shows_versions
        return ReplyStream(ChunkWriter(choices, form, head, options, has_text=has_text, versions=versions))

    async def write_all(complete: Sequence[CompleteChoice], *, offered: bool = False) -> bytes:
        n = sum(n_characters(choice.tokens) + len(choice.text) for choice in complete)
        n += sum(map(choices.routed_size, range(len(complete))))
        if choices.returns_token_ids:
            n += sum(
                6 * (len(choice.token_ids) + len(choices.prompt_ids(i))) for i, choice in enumerate(complete)
            )
        n += sum(map(choices.prompt_logprobs_size, range(len(complete))))

        def write() -> bytes:
            written = [_choice(choices, form, i, done, model) for i, done in enumerate(complete)]
            usage = choices.tally.usage().model_dump(exclude_none=True)
            whole = {**head, "object": form.object, "choices": written, "usage": usage}
            if not form.prompt_by_choice:
                whole |= _of_prompt(choices, 0)
            if (lease := choices.kv_lease) is not None and not offered:
                whole["kv_transfer_params"] = lease.as_dict()
            return as_json_bytes(whole, n)

        return await run_for_response(n, write)

    if choices.offers_early:
        return OfferingReply(choices, partial(write_all, offered=True), write_all)
    return Response(await write_all(await choices.complete(receive)), media_type="application/json")


def _choice(
    choices: Choices, form: ReplyForm, index: int, done: CompleteChoice, model: ServedModel
) -> dict[str, Any]:
    written: dict[str, Any] = {
        "index": index,
        **form.content(done),
        "logprobs": choices.logprobs(done.tokens),
        "finish_reason": choices.tally.finish_reason(index),
    }
    if done.score is not None:
        written["score"] = done.score
    if model.shows_versions:
        written["weights_version"] = choices.tally.weights_versions[index]
    if (experts := choices.routed_experts(index)) is not None:
        written["routed_experts"] = experts
    if choices.returns_token_ids:
        written["token_ids"] = [*done.token_ids]
    if form.prompt_by_choice:
        written |= _of_prompt(choices, index)
    return written


def _of_prompt(choices: Choices, index: int) -> dict[str, Any]:
    """The prompt's tokens and log-probabilities of choice `index`, if they were requested."""
    written = dict[str, Any]()
    if choices.returns_token_ids:
        written["prompt_token_ids"] = [*choices.prompt_ids(index)]
    if choices.returns_prompt_logprobs:
        written["prompt_logprobs"] = choices.prompt_logprobs(index)
    return written


def each(prompts: Sequence[T], work: Callable[[T], R], name: str = "prompt") -> list[R]:
    """Do `work` for each prompt. With several prompts, an InvalidRequest names the one at fault."""
    results = list[R]()
    for i, prompt in enumerate(prompts):
        try:
            results.append(work(prompt))
        except InvalidRequest as error:
            if len(prompts) == 1:
                raise
            raise type(error)(f"{name} {i}: {error}", param=error.param) from error
    return results
