"""Scores of pairs of texts by a model that generates nothing.

A model that makes embeddings compares the two texts' vectors; a ranker reads both texts at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orca_jax.errors import InvalidRequest
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.pooled_vector import embedding
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.embeddings import pooled_prompt
from server.gateway.gateway import Submission
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.fields.generation import renamed_fields
from server.http.relevance.running import all_ended, usage_of
from server.http.state import ApiCall

# The instruction and the form of texts with which Qwen3's rerankers are trained.
INSTRUCTED = "{instruction}"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class PairTemplate(NamedTuple):
    """The text around two texts that a model reads at once; `names`, in braces, stand for the two.

    `instruction` stands where the text has INSTRUCTED.
    """

    text: str
    names: tuple[str, str]
    instruction: str = INSTRUCTION

    def texts(self, first: str, second: str) -> dict[str, str]:
        """The texts of a pair by the names that they take the place of."""
        return {**dict(zip(self.names, (first, second), strict=True)), INSTRUCTED: self.instruction}


def pair_template(
    config: ModelConfig, template: str | None, *names: str, instruction: str | None = None
) -> PairTemplate | None:
    """The client's template with two fields' names, or the published one; both with the instruction.

    It is None where the tokenizer puts two texts together, or the model reads one at a time: there a template
    or an instruction is an error. Raises InvalidRequest.
    """
    if config.is_bidirectional or not config.ranker:
        for param, value in (("template", template), ("instruction", instruction)):
            if value is not None:
                message = f"{param} is set, and this model compares two texts as they are; leave it out"
                raise InvalidRequest(message, param=param)
        return None
    instructed = INSTRUCTION if instruction is None else instruction
    if template is None:
        return PairTemplate(QWEN3_TEMPLATE, ("{query}", "{document}"), instructed)
    first, second = (f"{{{name}}}" for name in names)
    if template.count(first) != 1 or template.count(second) != 1:
        message = f"template is {template[:100]!r}; it must have {first} and {second} once each"
        raise InvalidRequest(message, param="template")
    if instruction is not None and INSTRUCTED not in template:
        message = f"instruction is set, and template has no {INSTRUCTED}, where it would stand"
        raise InvalidRequest(message, param="instruction")
    return PairTemplate(template, (first, second), instructed)


async def similarities(
    call: ApiCall,
    model: ServedModel,
    scheduling: SchedulingParams,
    response_id: str,
    pairs: Sequence[tuple[str, str]],
    params: tuple[str, str],
    template: PairTemplate | None,
) -> tuple[list[float], dict[str, int]]:
    """The score of each pair, and the usage.

    It is the cosine of the two vectors, from -1 to 1, for which each different text runs once, or of a
    ranker's result the sigmoid, of two results the second part of the softmax, from 0 to 1. `template` is
    what `pair_template` returned. `params` are the fields that the first and the second texts come from.
    Raises a leaf of InvalidRequest.
    """
    scheduling = model.scheduled(scheduling)
    if model.config.ranker:
        return await _ranked(call, model, scheduling, response_id, pairs, params[1], template)
    field_of = {text: param for pair in pairs for text, param in zip(pair, params, strict=True)}

    def read() -> list[Submission]:
        submissions: list[Submission] = []
        for text, param in field_of.items():
            with renamed_fields(prompt=param):
                ids = model.encode(text, param=param)
                prompt = pooled_prompt(model.service, ids, None, scheduling, tenant=call.tenant)
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
    template: PairTemplate | None,
) -> tuple[list[float], dict[str, int]]:
    """A ranker's score of each pair, and the usage. `template` is what `pair_template` returned."""

    reads = model.config.ranker_head.pooling

    def read() -> list[Submission]:
        submissions: list[Submission] = []
        with renamed_fields(prompt=param):
            for i, (first, second) in enumerate(pairs):
                if template is None:
                    ids = model.encode_pair(first, second, param=param)
                else:
                    ids = model.encode_template(template.text, template.texts(first, second), param=param)
                prompt = pooled_prompt(model.service, ids, reads, scheduling, tenant=call.tenant)
                submissions.append(Submission(*prompt, f"{response_id}-{i}"))
        return submissions

    ended = await all_ended(call, await run_for_request(call.n_bytes, read))
    pooled = [live.pooled for live in ended if live.pooled is not None]
    assert len(pooled) == len(pairs)
    # Of two results the sigmoid of their difference is the softmax's second part.
    results = [float(each[-1]) - (float(each[0]) if len(each) > 1 else 0.0) for each in pooled]
    # exp of at most 0, so that it never overflows
    scores = [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in results]
    return scores, usage_of(sum(live.n_input for live in ended))
