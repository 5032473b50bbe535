"""`POST /v1/embeddings`: a vector for each text, from the model's final hidden states."""

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from orca_jax.request.pooled_vector import Vector, embedding
from orca_jax.request.pooling import Pooling, check_dimensions
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.embeddings import pooled_prompt
from orca_jax.service.prepared_params import OutputRules
from server.gateway.gateway import Submission, check_embeddings, check_inputs
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json
from server.http.fields.generation import Prompts, ranged, renamed_fields, singles
from server.http.generation.answer import GENERATION_ERRORS, each, new_response_id
from server.http.relevance.running import PromptUsage, RelevanceRequest, all_ended, usage_of
from server.http.state import CallOf

_CHARACTERS = {"float": 22, "base64": 6}  # that a number takes in a response, at most


class EmbeddingRequest(RelevanceRequest):
    """POST /v1/embeddings."""

    input: Annotated[Prompts, Field(description="a text, texts, token ids, or lists of token ids")]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Field(description="default float; base64: of little-endian float32"),
    ] = None
    dimensions: Annotated[
        int | None, ranged("only the first numbers of each vector; default: all", 1, 1 << 20)
    ] = None
    pooling: Annotated[
        Pooling | None,
        Field(
            description="an extension: the hidden state of the last or the first token (cls), or the mean "
            "over all tokens; default: the server's --pooling"
        ),
    ] = None
    normalize: Annotated[
        bool | None, Field(description="an extension: make each vector's length 1; default true")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="an extension: tokenize texts with special tokens; default true")
    ] = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs; empty if the client gave an empty list."""
        return singles(self.input)


class EmbeddingData(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[list[float] | str, Field(description="with encoding_format base64: a text")]


class Embeddings(BaseModel):
    """The response to POST /v1/embeddings, in the inputs' order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: PromptUsage


router = APIRouter(route_class=JsonRoute, tags=["relevance"])


@router.post(
    "/v1/embeddings", response_class=Response, responses={200: {"model": Embeddings}, **GENERATION_ERRORS}
)
async def create_embeddings(body: EmbeddingRequest, call: CallOf) -> Response:
    """Make a vector of each input."""
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    size = model.config.pooled_size if body.dimensions is None else body.dimensions
    response_id, scheduling = new_response_id("embd"), model.scheduled(body.scheduling)

    def read() -> list[Submission]:
        inputs = body.inputs
        check_inputs(len(inputs), call.options.max_inputs, "input")
        check_dimensions(body.dimensions, model.config.pooled_size)
        check_embeddings(len(inputs), size, "input")
        special = body.add_special_tokens is not False

        def checked(ids: str | list[int]) -> tuple[CheckedPrompt, OutputRules]:
            if isinstance(ids, str):
                ids = model.encode(ids, param="input", add_special_tokens=special)
            return pooled_prompt(model.service, ids, body.pooling, scheduling, tenant=call.tenant)

        prompts = each(inputs, checked, "input")
        return [Submission(*one, f"{response_id}-{i}") for i, one in enumerate(prompts)]

    with renamed_fields(prompt="input"):
        submissions = await run_for_request(call.n_bytes, read)
    ended = await all_ended(call, submissions)
    encoding = body.encoding_format or "float"
    n_characters = len(ended) * size * _CHARACTERS[encoding]

    def write() -> bytes:
        vectors = [live.pooled for live in ended]
        shown = [
            _written(
                embedding(vector, dimensions=body.dimensions, normalize=body.normalize is not False), encoding
            )
            for vector in vectors
            if vector is not None
        ]
        assert len(shown) == len(ended)
        whole = {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)],
            "model": model.name,
            "usage": usage_of(sum(live.n_input for live in ended)),
        }
        return as_json(whole, n_characters).encode()

    return Response(await run_for_response(n_characters, write), media_type="application/json")


def _written(vector: Vector, encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
