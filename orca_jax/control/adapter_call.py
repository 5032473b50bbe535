"""The call that gives a worker its stage's part of a LoRA adapter (worker.proto's Adapter).

It has a connection of its own: an adapter may be a hundred megabytes, and no iteration waits for it.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import grpc

from orca_jax.control.frame import MAX_FRAME, check_exact, parsed
from orca_jax.control.handshake import MASTER, OPTIONS, JoinTerms, metadata
from orca_jax.control.worker_pb2 import AdapterPart
from orca_jax.errors import BadFrame, WorkerRefused, WorkerUnreachable

ADAPTER_METHOD = "/orca.v1.Worker/Adapter"
_WHAT = "a part of an adapter"
# Another try may succeed: the worker is not there, or does not know the epoch yet.
_LATER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class AdapterPiece(NamedTuple):
    """The change of a part of a weight, in the weight's dtype: b [*out, rank] times a [rank, *in]."""

    weight: str
    part: int
    rank: int
    a: bytes
    b: bytes


def encode_pieces(epoch: int, version: int, pieces: Iterable[AdapterPiece]) -> Iterator[bytes]:
    """The messages of a call, which begin with one without a weight."""
    for piece in (AdapterPiece("", 0, 0, b"", b""), *pieces):
        checksum = zlib.crc32(piece.b, zlib.crc32(piece.a))
        part = AdapterPart(epoch=epoch, version=version, checksum=checksum, **piece._asdict())
        yield part.SerializeToString()


def decode_pieces(messages: Iterator[bytes]) -> tuple[int, int, Iterator[AdapterPiece]]:
    """A call's epoch, version and pieces, which are read as they are asked for. Raises BadFrame."""
    first = _decode(next(messages, b""))
    if first.weight:
        raise BadFrame("an adapter's first message has a weight; it must have none")

    def rest() -> Iterator[AdapterPiece]:
        for data in messages:
            part = _decode(data)
            if (part.epoch, part.version) != (first.epoch, first.version) or not part.weight:
                raise BadFrame("the parts of an adapter have different epochs or versions, or no weight")
            yield AdapterPiece(part.weight, part.part, part.rank, part.a, part.b)

    return first.epoch, first.version, rest()


def give_adapter(
    address: str,
    terms: JoinTerms,
    secret: str,
    *,
    epoch: int,
    version: int,
    pieces: Iterable[AdapterPiece],
    seconds: float,
) -> None:
    """Give the worker at `address` an adapter, and wait until its devices have it.

    Raises WorkerUnreachable if another try may succeed, and WorkerRefused if not.
    """
    with grpc.insecure_channel(address, OPTIONS) as channel:
        call = cast(Any, channel.stream_unary(ADAPTER_METHOD))
        try:
            call(
                encode_pieces(epoch, version, pieces),
                metadata=metadata(MASTER, terms, secret),
                timeout=seconds,
            )
        except grpc.RpcError as error:
            failed: Any = error
            kind = WorkerUnreachable if failed.code() in _LATER else WorkerRefused
            raise kind(
                f"the worker of stage {terms.stage + 1} at {address} did not take an adapter: "
                f"{failed.details()}"
            ) from error


def _decode(data: bytes) -> AdapterPart:
    part = parsed(AdapterPart, data, MAX_FRAME, _WHAT)
    check_exact(part, data, _WHAT)
    if part.checksum != zlib.crc32(part.b, zlib.crc32(part.a)):
        raise BadFrame("a part of an adapter is corrupt: its checksum does not match")
    return part
