"""The method Embed of orca.v1.Generation; generation.proto documents it."""

import uuid
from functools import partial

from orca_jax.errors import InvalidPrompt, RequestCancelled
from orca_jax.request.pooled_vector import embedding
from orca_jax.request.pooling import check_dimensions
from orca_jax.service.embeddings import pooled_prompt
from server.gateway.gateway import Gateway, LiveRequest, Submission, all_ended, check_embeddings, check_inputs
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request, run_for_response
from server.rpc import generation_pb2 as pb
from server.rpc import messages
from server.rpc.calls import Calls, Context, Deadline
from server.settings.endpoint_options import EndpointOptions


class Embedding:
    """Passes calls to the gateway; `options` have the limits and the server's pooling."""

    def __init__(self, gateway: Gateway, calls: Calls, options: EndpointOptions) -> None:
        self._gateway, self._calls, self._options = gateway, calls, options

    async def embed(self, data: bytes, context: Context) -> pb.EmbedResponse:
        """Make a vector of each input."""
        async with self._calls.answered("Embed", context) as facts:
            request = await run_for_request(len(data), partial(messages.parsed, pb.EmbedRequest, data))
            model = self._gateway.model(request.model or None)
            tenant = self._calls.tenant(context)
            read = partial(self._read, request, model, tenant)
            submissions = await run_for_request(len(data), read)
            running: list[LiveRequest] = []
            ended = await all_ended(
                self._gateway,
                submissions,
                owner=self._calls.owner(context),
                running=running,
                timeout=Deadline(context).seconds,
            )
            facts["prompt_tokens"] = sum(live.n_input for live in ended)
            n_numbers = len(ended) * model.config.embedding.size
            return await run_for_response(n_numbers, partial(_response, request, ended))

    def _read(self, request: pb.EmbedRequest, model: ServedModel, tenant: str) -> list[Submission]:
        """The requests of the engine. The cost grows with the message."""
        scheduling = messages.scheduling_params(request)
        scheduling.check_policy(model.serving.scheduling.scheduling_policy)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        size = model.config.embedding.size
        check_inputs(len(request.inputs), self._options.max_inputs, "inputs")
        check_dimensions(dimensions, size)
        check_embeddings(len(request.inputs), size if dimensions is None else dimensions, "inputs")
        pooling, name = request.pooling or self._options.pooling, f"embd-{uuid.uuid4().hex}"
        submissions: list[Submission] = []
        for i, one in enumerate(request.inputs):
            kind = one.WhichOneof("input")
            if kind is None:
                message = f"inputs.{i} has neither text nor token_ids; set one of them"
                raise InvalidPrompt(message, param=f"inputs.{i}")
            if kind == "token_ids":
                token_ids = messages.numbers("inputs", one.token_ids.ids)
            else:
                token_ids = model.encode(one.text, param="inputs")
            prompt = pooled_prompt(model.service, token_ids, pooling, scheduling, tenant=tenant)
            submissions.append(Submission(*prompt, f"{name}-{i}"))
        return submissions


def _response(request: pb.EmbedRequest, ended: list[LiveRequest]) -> pb.EmbedResponse:
    dimensions = request.dimensions if request.HasField("dimensions") else None
    normalize = request.normalize if request.HasField("normalize") else True
    response = pb.EmbedResponse(prompt_tokens=sum(live.n_input for live in ended))
    for live in ended:
        if live.pooled is None:
            raise RequestCancelled("a request for an embedding ended early")
        vector = embedding(live.pooled, dimensions=dimensions, normalize=normalize)
        response.embeddings.add(values=vector.tolist())
    return response
