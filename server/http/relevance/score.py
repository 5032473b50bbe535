"""`POST /v1/score` and `/v1/rerank`: how likely one text is after another, according to the model.

The score of a pair is the mean log-probability per token of the second text, given the first and the template
around them; docs/embeddings.md has the exact definition. A model that only makes embeddings compares vectors
instead, and a ranker reads both texts at once, in a template if it is a decoder (similarity.py). `/v1/score`
returns scores in vLLM's form; `/v1/rerank` sorts documents, in Jina's form, by the score of the query after
each, or of the document for the query where the model compares.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.scores import score_request
from server.gateway.gateway import LiveRequest, Submission, check_inputs
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request, run_for_response
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json
from server.http.fields.generation import ranged, renamed_fields
from server.http.fields.strict import Strict
from server.http.generation.answer import GENERATION_ERRORS, each, new_response_id
from server.http.relevance.running import PromptUsage, RelevanceRequest, all_ended, usage_of
from server.http.relevance.similarity import pair_template, similarities
from server.http.state import ApiCall, CallOf

_PLAIN = "{text_1}{text_2}"
_LINES = "{document}\n{query}"
_MOST = 8192  # characters of a template
_Texts = str | list[str]

router = APIRouter(route_class=JsonRoute, tags=["relevance"])


class InstructedRequest(RelevanceRequest):
    """The fields of both routes; an instruction is for rankers that read one, as Qwen3's do."""

    instruction: Annotated[
        str | None,
        Field(
            description="what makes a document relevant, for a ranker with a template, in the place of "
            "{instruction}; default: the ranker's own",
            json_schema_extra={"maxLength": _MOST},
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description='{"instruction": "..."} is another way to set it')
    ] = None

    @property
    def instructed(self) -> str | None:
        """The instruction of either field; as in vLLM, that of chat_template_kwargs first.

        Raises InvalidRequest.
        """
        given = self.chat_template_kwargs or {}
        param = "chat_template_kwargs"
        for name in given.keys() - {"instruction"}:
            message = f"{param}.{name[:100]} is not supported: a pair's template takes instruction alone"
            raise InvalidRequest(message, param=param)
        found = given.get("instruction", self.instruction)
        if found is not None and not isinstance(found, str):
            raise InvalidRequest(f"{param}.instruction: expected a text", param=param)
        return found


def _refuse_instruction(instruction: str | None) -> None:
    """Refuse an instruction for a model that generates. Raises InvalidRequest."""
    if instruction is not None:
        message = "instruction is set, and only a model that ranks texts reads one; put it into template"
        raise InvalidRequest(message, param="instruction")


class ScoreRequest(InstructedRequest):
    """POST /v1/score: one `text_1` for all of `text_2`, or one for each."""

    text_1: Annotated[_Texts, Field(description="the first text of each pair")]
    text_2: Annotated[
        _Texts, Field(description="the second text of each pair, whose log-probability is scored")
    ]
    template: Annotated[
        str | None,
        Field(
            description=f"an extension: what is around the texts; it ends with {{text_2}}; default {_PLAIN}",
            json_schema_extra={"maxLength": _MOST},
        ),
    ] = None

    def pairs(self, most: int) -> list[tuple[str, str]]:
        """Up to `most` pairs of texts. Raises InvalidRequest."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        check_inputs(len(second), most, "text_2")
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one, or one for each"
            raise InvalidRequest(message, param="text_1")
        return list(zip(first * (len(second) // len(first)), second, strict=True))


class ScoreData(BaseModel):
    """The score of one pair: a mean log-probability, at most 0, or the cosine of two vectors."""

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


class DocumentText(Strict):
    """A document as an object."""

    text: str


class RerankRequest(InstructedRequest):
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
            json_schema_extra={"maxLength": _MOST},
        ),
    ] = None


class RankedDocument(BaseModel):
    """A document. `relevance_score` is the geometric mean of its query's probabilities, or a cosine."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(BaseModel):
    """The response to POST /v1/rerank, the most relevant document first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


@router.post("/score", response_class=Response, include_in_schema=False)
@router.post("/v1/score", response_class=Response, responses={200: {"model": Scores}, **GENERATION_ERRORS})
async def create_scores(body: ScoreRequest, call: CallOf) -> Response:
    """Score each second text by its mean log-probability per token after the first."""
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    response_id = new_response_id("score")

    params = "text_1", "text_2"

    def read() -> _Comparison:
        _refuse_instruction(body.instructed)
        template = _template(body.template or _PLAIN, *params)
        return _Comparison(body.pairs(call.options.max_inputs), template, params)

    if model.config.only_pools:
        around = pair_template(model.config, body.template, *params, instruction=body.instructed)
        pairs = body.pairs(call.options.max_inputs)
        scores, usage = await similarities(call, model, body.scheduling, response_id, pairs, params, around)
    else:
        scores, usage = await _scores(call, model, body.scheduling, response_id, read)
    whole = {
        "id": response_id,
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": usage,
    }
    return await _json(whole, 60 * len(scores))


@router.post("/rerank", response_class=Response, include_in_schema=False)
@router.post("/v1/rerank", response_class=Response, responses={200: {"model": Ranking}, **GENERATION_ERRORS})
async def rerank(body: RerankRequest, call: CallOf) -> Response:
    """Order documents by how likely the query is after each of them."""
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    response_id = new_response_id("rerank")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]

    params = "documents", "query"

    def pairs() -> list[tuple[str, str]]:
        check_inputs(len(documents), call.options.max_inputs, "documents")
        if body.top_n is not None and body.top_n < 1:
            raise InvalidRequest(f"top_n is {body.top_n}; it must be at least 1", param="top_n")
        return [(document, body.query) for document in documents]

    def read() -> _Comparison:
        _refuse_instruction(body.instructed)
        return _Comparison(pairs(), _template(body.template or _LINES, "document", "query"), params)

    compares = model.config.only_pools
    if compares:
        names = "query", "document"
        around = pair_template(model.config, body.template, *names, instruction=body.instructed)
        asked = [(query, document) for document, query in pairs()]  # the order that rankers are trained with
        scores, usage = await similarities(
            call, model, body.scheduling, response_id, asked, (params[1], params[0]), around
        )
    else:
        scores, usage = await _scores(call, model, body.scheduling, response_id, read)
    shows = body.return_documents is not False
    results: list[dict[str, Any]] = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]:
        document = {"document": {"text": documents[i]}} if shows else {}
        relevance = scores[i] if compares else math.exp(scores[i])
        results.append({"index": i, "relevance_score": relevance, **document})
    whole = {"id": response_id, "model": model.name, "usage": usage, "results": results}
    return await _json(whole, sum(map(len, documents)) * shows + 60 * len(results))


async def _scores(
    call: ApiCall,
    model: ServedModel,
    scheduling: SchedulingParams,
    response_id: str,
    read: Callable[[], "_Comparison"],
) -> tuple[list[float], dict[str, int]]:
    """The scores of the pairs that `read` returns, and the usage. Raises a leaf of InvalidRequest."""

    scheduling = model.scheduled(scheduling)

    def encoded() -> list[_Pair]:
        texts, template, params = read()

        def checked(numbered: tuple[int, tuple[str, str]]) -> _Pair:
            i, (first, second) = numbered
            before = model.encode(template.before + first + template.between, param=params[0])
            after = model.encode(second, param=params[1], add_special_tokens=False)
            for ids, param in ((before, params[0]), (after, params[1])):
                if not ids:
                    raise InvalidRequest(f"{param} has no tokens; it needs at least one", param=param)
            ids = [*before, *after]
            one = score_request(model.service, ids, len(before), scheduling, tenant=call.tenant)
            return _Pair(Submission(one.prompt, one.rules, f"{response_id}-{i}"), len(after))

        with renamed_fields(prompt=params[0]):
            return each(list(enumerate(texts)), checked, "pair")

    pairs = await run_for_request(call.n_bytes, encoded)
    ended = await all_ended(call, [pair.submission for pair in pairs])

    def scores() -> list[float]:
        return [_score(live, pair) for live, pair in zip(ended, pairs, strict=True)]

    n_tokens = sum(live.n_input for live in ended)
    return await run_for_response(n_tokens, scores), usage_of(sum(pair.n_tokens for pair in pairs))


class _Comparison(NamedTuple):
    """Pairs of texts, the template around each, and the fields that the first and second texts come from."""

    texts: Sequence[tuple[str, str]]
    template: "_Template"
    params: tuple[str, str]


class _Template(NamedTuple):
    """The parts of a template: `before`, the first text, `between`, the second text."""

    before: str
    between: str


def _template(text: str, first: str, second: str) -> _Template:
    """Parse a template, which has both names in braces, the second at its end. Raises InvalidRequest."""
    names = f"{{{first}}}", f"{{{second}}}"
    before, found, rest = text.partition(names[0])
    between, _, after = rest.partition(names[1])
    if not found or not rest.endswith(names[1]) or after or names[1] in before or names[0] in rest:
        message = f"template is {text[:100]!r}; it must have {names[0]} once and then, at its end, {names[1]}"
        raise InvalidRequest(message, param="template")
    return _Template(before, between)


class _Pair(NamedTuple):
    """A pair's request, and how many of its last tokens are the second text's."""

    submission: Submission
    n_scored: int

    @property
    def n_tokens(self) -> int:
        """Tokens of both texts and of the template."""
        return len(self.submission.prompt.token_ids) + len(self.submission.prompt.scored_ids)


def _score(request: LiveRequest, pair: _Pair) -> float:
    """The mean log-probability of the second text's tokens, once the request has ended."""
    n_output = len(pair.submission.prompt.scored_ids)
    known = [*(request.prompt_logprobs or ()), *request.logprobs[:n_output]]
    scored = known[-pair.n_scored :]
    assert len(scored) == pair.n_scored
    return sum(token.logprob for token in scored) / len(scored)


async def _json(whole: dict[str, Any], n: int) -> Response:
    """The response of about `n` characters."""
    text = await run_for_response(n, lambda: as_json(whole, n).encode())
    return Response(text, media_type="application/json")
