"""`POST /v1/score`: how likely each second text is after a first one, in vLLM's form."""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from server.gateway.gateway import check_inputs
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json
from server.http.fields.generation import renamed_fields
from server.http.generation.answer import GENERATION_ERRORS, new_response_id
from server.http.generation.state import CallOf
from server.http.relevance.conditional import MAX_TEMPLATE, Pair, pairs, score_of, template_of
from server.http.relevance.running import PromptUsage, RelevanceRequest, all_ended, usage_of

_PLAIN = "{text_1}{text_2}"
_Texts = str | list[str]


class ScoreRequest(RelevanceRequest):
    """POST /v1/score: one `text_1` for all of `text_2`, or one for each."""

    text_1: Annotated[_Texts, Field(description="what comes first")]
    text_2: Annotated[_Texts, Field(description="whose log-probability is the score")]
    template: Annotated[
        str | None,
        Field(
            description=f"an extension: what is around the texts; it ends with {{text_2}}; default {_PLAIN}",
            json_schema_extra={"maxLength": MAX_TEMPLATE},
        ),
    ] = None

    def text_pairs(self, most: int) -> list[tuple[str, str]]:
        """Raises InvalidRequest."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        check_inputs(len(second), most, "text_2")
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one, or one for each"
            raise InvalidRequest(message, param="text_1")
        return list(zip(first * (len(second) // len(first)), second, strict=True))


class ScoreData(BaseModel):
    """The score of one pair: a mean log-probability, at most 0."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    """The response to POST /v1/score, in the order of `text_2`."""

    id: str
    object: Literal["list"] = "list"
    created: Annotated[int, Field(description="in seconds since 1970")]
    model: str
    data: list[ScoreData]
    usage: PromptUsage


router = APIRouter(route_class=JsonRoute, tags=["relevance"])


@router.post("/score", response_class=Response, include_in_schema=False)
@router.post(
    "/v1/score",
    response_class=Response,
    responses={200: {"model": Scores}, **GENERATION_ERRORS},
)
async def create_scores(
    body: ScoreRequest,
    call: CallOf,
) -> Response:
    """Score each second text by its mean log-probability per token after the first."""
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    response_id = new_response_id("score")

    def read() -> list[Pair]:
        texts = body.text_pairs(call.options.max_inputs)
        template = template_of(body.template or _PLAIN, "text_1", "text_2")
        names = {"tenant": call.tenant, "response_id": response_id}
        return pairs(model, texts, template, body.scheduling, **names, params=("text_1", "text_2"))

    with renamed_fields(prompt="text_1"):
        asked = await run_for_request(call.n_bytes, read)
    submissions = [pair.submission for pair in asked]
    ended = await all_ended(call, submissions)
    n_tokens = sum(live.n_input for live in ended)

    def write() -> bytes:
        scores = [score_of(live, pair) for live, pair in zip(ended, asked, strict=True)]
        whole = {
            "id": response_id,
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": usage_of(sum(pair.n_tokens for pair in asked)),
        }
        return as_json(whole, 60 * len(scores)).encode()

    return Response(await run_for_response(n_tokens, write), media_type="application/json")
