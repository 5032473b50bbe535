"""Converts between the messages of generation.proto and the engine's types."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orca_jax.errors import InvalidRequest, RequestCancelled
from orca_jax.request.pooled_vector import embedding
from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.output import Piece
from server.gateway.gateway import LiveRequest
from server.gateway.random_ids import random_id
from server.gateway.served_model import ServedModel
from server.rpc import generation_pb2 as pb
from server.rpc.field_count import MAX_FIELDS, MAX_NUMBERS, has_too_long_list, has_too_many_fields

M = TypeVar("M", bound=Message)

_AT_ONCE = 65_536

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_FINISH_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def parsed(kind: type[M], data: bytes) -> M:
    """Parse a message.

    Raises InvalidRequest if it is malformed, or has unknown fields, too many fields or a too long list.
    """
    if len(data) > MAX_FIELDS and has_too_many_fields(kind.DESCRIPTOR, data):
        raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields; send less", param="message")
    if len(data) > MAX_NUMBERS and has_too_long_list(kind.DESCRIPTOR, data):
        text = f"a list in the message has more than {MAX_NUMBERS} numbers; send fewer"
        raise InvalidRequest(text, param="message")
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        text = f"the message is not a valid {kind.DESCRIPTOR.full_name}: {error}"
        raise InvalidRequest(text, param="message") from error
    _refuse_unknown_fields(message, "")
    return message


def _refuse_unknown_fields(message: Message, path: str) -> None:
    for unknown in UnknownFieldSet(message):
        name, number = message.DESCRIPTOR.full_name, unknown.field_number
        text = f"{name} has no field of the number {number}; leave it out, or ask a newer server"
        raise InvalidRequest(text, param=f"{path}{number}")
    for field, value in message.ListFields():
        if isinstance(value, Message):
            _refuse_unknown_fields(value, f"{path}{field.name}.")
        elif field.message_type is not None:
            for i, each in enumerate(value):
                if isinstance(each, Message):  # keys of a map are not messages
                    _refuse_unknown_fields(each, f"{path}{field.name}.{i}.")


def request_id(request: pb.GenerateRequest) -> str:
    """The client's request id, or a new one. Raises InvalidRequest."""
    if not request.request_id:
        return f"gen-{random_id()}"
    if not _REQUEST_ID.fullmatch(request.request_id):
        message = f"request_id is {request.request_id[:200]!r}; "
        message += "it must be 1 to 128 printable ASCII characters without spaces, or not set"
        raise InvalidRequest(message, param="request_id")
    return request.request_id


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """The engine's sampling parameters. Unset fields get the model's `defaults`, or else the engine's.

    Raises InvalidSamplingParameter.
    """
    given = {field.name: _plain(value) for field, value in message.ListFields()}
    if given.get("early_stopping") in ("true", "false"):
        given["early_stopping"] = given["early_stopping"] == "true"
    return SamplingParams(**with_defaults(defaults, given))


def scheduling_params(request: pb.GenerateRequest | pb.EmbedRequest) -> SchedulingParams:
    """Priority and cache salt. Raises InvalidSchedulingParameter."""
    salt = request.cache_salt if request.HasField("cache_salt") else None
    return SchedulingParams(priority=request.priority, cache_salt=salt)


def _plain(value: Any) -> Any:
    """A field's value in the form of SamplingParams, whose fields have the same names."""
    if isinstance(value, pb.TokenIds):
        return tuple(numbers("allowed_token_ids", value.ids))
    if isinstance(value, pb.Texts):
        return tuple(value.texts)
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | bool | int | float) else tuple(value)


def numbers(name: str, value: Sequence[int]) -> list[int]:
    """A repeated numeric field as a list, copied in chunks so that other threads can run in between.

    Raises InvalidRequest for more than MAX_NUMBERS, the limit over HTTP.
    """
    if len(value) > MAX_NUMBERS:
        message = f"{name} has {len(value)} token ids; {MAX_NUMBERS} are allowed"
        raise InvalidRequest(message, param=name)
    copied = list[int]()
    for start in range(0, len(value), _AT_ONCE):
        copied += value[start : start + _AT_ONCE]
    return copied


def response(
    live: LiveRequest, piece: Piece, n_before: int, *, request_id: str, index: int
) -> pb.GenerateResponse:
    """A piece of choice `index` as a message. Earlier messages held `n_before` of its tokens."""
    message = pb.GenerateResponse(
        request_id=request_id,
        text=piece.text,
        token_ids=piece.token_ids,
        seed=live.seed if n_before == 0 else None,
        index=index,
        score=piece.score,
    )
    if piece.logprobs:
        message.logprobs.extend(_logprobs(piece.logprobs))
    if n_before == 0 and live.prompt_logprobs is not None:
        message.prompt_logprobs.extend(_logprobs(live.prompt_logprobs))
    if piece.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[piece.finish_reason]
        message.weights_version = piece.weights_version or 0
        message.usage.prompt_tokens = live.n_input
        message.usage.cached_tokens = live.n_cached
        message.usage.completion_tokens = n_before + len(piece.token_ids)
        if (ids := live.routed_experts) is not None:
            n_tokens, n_layers, top_k = ids.shape
            message.routed_experts.MergeFrom(
                pb.RoutedExperts(ids=ids.tobytes(), n_tokens=n_tokens, n_layers=n_layers, top_k=top_k)
            )
    return message


def embeddings(request: pb.EmbedRequest, ended: Sequence[LiveRequest]) -> pb.EmbedResponse:
    """The vectors of ended requests as a message. Raises RequestCancelled if one ended early."""
    dimensions = request.dimensions if request.HasField("dimensions") else None
    normalize = request.normalize if request.HasField("normalize") else True
    response = pb.EmbedResponse(prompt_tokens=sum(live.n_input for live in ended))
    for live in ended:
        if live.pooled is None:
            raise RequestCancelled("a request for an embedding ended early")
        vector = embedding(live.pooled, dimensions=dimensions, normalize=normalize)
        response.embeddings.add(values=vector.tolist())
    return response


def _logprobs(logprobs: Iterable[TokenLogprobs]) -> Iterable[pb.TokenLogprobs]:
    for token_id, logprob, top in logprobs:
        likeliest = [pb.TopLogprob(token_id=other, logprob=value) for other, value in top]
        yield pb.TokenLogprobs(token_id=token_id, logprob=logprob, top=likeliest)


def model_card(model: ServedModel) -> pb.Model:
    """The description of the model for clients."""
    return pb.Model(
        name=model.name,
        created=model.created,
        max_model_len=model.service.most_output(0),
        vocab_size=model.config.vocab_size,
        has_tokenizer=model.tokenizer is not None,
    )
