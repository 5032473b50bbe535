"""`POST /v1/rerank`: documents by how likely a query is after each of them, in Jina's form."""

import math
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from server.gateway.gateway import check_inputs
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json
from server.http.fields.generation import ranged, renamed_fields
from server.http.fields.strict import Strict
from server.http.generation.answer import GENERATION_ERRORS, new_response_id
from server.http.generation.state import CallOf
from server.http.relevance.conditional import MAX_TEMPLATE, Pair, pairs, score_of, template_of
from server.http.relevance.running import PromptUsage, RelevanceRequest, all_ended, usage_of

_LINES = "{document}\n{query}"


class DocumentText(Strict):
    """A document as an object."""

    text: str


class RerankRequest(RelevanceRequest):
    """POST /v1/rerank."""

    query: str
    documents: list[str | DocumentText]
    top_n: Annotated[int | None, ranged("return only the best; default: all", 1, 1 << 20)] = None
    return_documents: Annotated[
        bool | None, Field(description="return each document's text too; default true")
    ] = None
    template: Annotated[
        str | None,
        Field(
            description="an extension: what is around the texts; it ends with {query}; default: document, "
            "a line break and the query",
            json_schema_extra={"maxLength": MAX_TEMPLATE},
        ),
    ] = None

    @property
    def texts(self) -> list[str]:
        """Each document's."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RankedDocument(BaseModel):
    """A document. `relevance_score` is between 0 and 1: the geometric mean of its query's probabilities."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(BaseModel):
    """The response to POST /v1/rerank, the most relevant document first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


router = APIRouter(route_class=JsonRoute, tags=["relevance"])


@router.post("/rerank", response_class=Response, include_in_schema=False)
@router.post(
    "/v1/rerank",
    response_class=Response,
    responses={200: {"model": Ranking}, **GENERATION_ERRORS},
)
async def rerank(
    body: RerankRequest,
    call: CallOf,
) -> Response:
    """Order documents by how likely the query is after each of them."""
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    response_id, texts = new_response_id("rerank"), body.texts

    def read() -> list[Pair]:
        check_inputs(len(texts), call.options.max_inputs, "documents")
        if body.top_n is not None:
            check_inputs(body.top_n, 1 << 20, "top_n")
        template = template_of(body.template or _LINES, "document", "query")
        both = [(text, body.query) for text in texts]
        names = {"tenant": call.tenant, "response_id": response_id}
        return pairs(model, both, template, body.scheduling, **names, params=("documents", "query"))

    with renamed_fields(prompt="documents"):
        asked = await run_for_request(call.n_bytes, read)
    submissions = [pair.submission for pair in asked]
    ended = await all_ended(call, submissions)
    n_tokens = sum(live.n_input for live in ended)
    shows = body.return_documents is not False

    def write() -> bytes:
        scores = [score_of(live, pair) for live, pair in zip(ended, asked, strict=True)]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results: list[dict[str, Any]] = []
        for i in order:
            document = {"document": {"text": texts[i]}} if shows else {}
            results.append({"index": i, "relevance_score": math.exp(scores[i]), **document})
        usage = usage_of(sum(pair.n_tokens for pair in asked))
        whole = {"id": response_id, "model": model.name, "usage": usage, "results": results}
        return as_json(whole, sum(map(len, texts)) * shows + 60 * len(results)).encode()

    return Response(await run_for_response(n_tokens, write), media_type="application/json")
