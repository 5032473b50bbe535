"""Scores of pairs of texts by a model that generates nothing.

A model that makes embeddings compares the two texts' vectors; a ranker reads both texts at once.
"""

import math
from collections.abc import Sequence

import numpy as np

from orca_jax.errors import InvalidRequest
from orca_jax.request.pooled_vector import embedding
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.embeddings import pooled_prompt
from server.gateway.gateway import Submission
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.fields.generation import renamed_fields
from server.http.relevance.running import all_ended, usage_of
from server.http.state import ApiCall


def refuse_template(template: str | None) -> None:
    """Raise InvalidRequest for a template, which is for models that score one text after another."""
    if template is not None:
        message = "template is set, and this model compares two texts as they are; leave it out"
        raise InvalidRequest(message, param="template")


async def similarities(
    call: ApiCall,
    model: ServedModel,
    scheduling: SchedulingParams,
    response_id: str,
    pairs: Sequence[tuple[str, str]],
    params: tuple[str, str],
) -> tuple[list[float], dict[str, int]]:
    """The score of each pair, and the usage.

    It is the cosine of the two vectors, from -1 to 1, for which each different text runs once, or the sigmoid
    of a ranker's result, from 0 to 1. `params` are the fields that the first and the second texts come from.
    Raises a leaf of InvalidRequest.
    """
    scheduling = model.scheduled(scheduling)
    if model.config.ranker:
        return await _ranked(call, model, scheduling, response_id, pairs, params[1])
    field_of = {text: param for pair in pairs for text, param in zip(pair, params, strict=True)}

    def read() -> list[Submission]:
        submissions: list[Submission] = []
        for text, param in field_of.items():
            with renamed_fields(prompt=param):
                ids, pooling = model.encode(text, param=param), call.options.pooling
                prompt = pooled_prompt(model.service, ids, pooling, scheduling, tenant=call.tenant)
                submissions.append(Submission(*prompt, f"{response_id}-{len(submissions)}"))
        return submissions

    ended = await all_ended(call, await run_for_request(call.n_bytes, read))
    n_read = {text: live.n_input for text, live in zip(field_of, ended, strict=True)}

    def cosines() -> list[float]:
        vectors = {
            text: embedding(live.pooled)
            for text, live in zip(field_of, ended, strict=True)
            if live.pooled is not None
        }
        return [float(np.dot(vectors[first], vectors[second])) for first, second in pairs]

    scores = await run_for_response(len(pairs) * model.config.hidden_size, cosines)
    return scores, usage_of(sum(n_read[text] for pair in pairs for text in pair))


async def _ranked(
    call: ApiCall,
    model: ServedModel,
    scheduling: SchedulingParams,
    response_id: str,
    pairs: Sequence[tuple[str, str]],
    param: str,
) -> tuple[list[float], dict[str, int]]:
    """A ranker's score of each pair, and the usage."""

    def read() -> list[Submission]:
        submissions: list[Submission] = []
        with renamed_fields(prompt=param):
            for i, (first, second) in enumerate(pairs):
                ids = model.encode_pair(first, second, param=param)
                prompt = pooled_prompt(model.service, ids, "cls", scheduling, tenant=call.tenant)
                submissions.append(Submission(*prompt, f"{response_id}-{i}"))
        return submissions

    ended = await all_ended(call, await run_for_request(call.n_bytes, read))
    results = [float(live.pooled[0]) for live in ended if live.pooled is not None]
    assert len(results) == len(pairs)
    # exp of at most 0, so that it never overflows
    scores = [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in results]
    return scores, usage_of(sum(live.n_input for live in ended))
