"""Control-plane frames: the messages between the engine master and its workers (worker.proto).

Each frame carries its epoch, iteration and stage, so the receiver can recognize a late frame, and a
checksum over them and the payload. gRPC has no checksum, and TCP's 16-bit one misses corruption that CRC-32
catches; a corrupted control message that still decodes could overwrite another request's keys and values.
"""

import math
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from orca_jax.control import worker_pb2
from orca_jax.errors import BadFrame

M = TypeVar("M", bound=Message)

PROTOCOL_VERSION = 11
MAX_FRAME = 512 << 20  # bytes; engine/remote_pipeline.py rejects an engine that could need more
FRAME_BYTES = 64  # upper bound of a frame's overhead around its payload
MAX_EPOCH = 1 << 63  # far above an engine master's first epoch, the nanoseconds since 1970
_UP_TO_VERSION_4 = struct.Struct("<HB")  # the start of such a frame: magic, version
_MAGIC = 0x0CA1
_FRAME, _BODY = "a frame of orca_jax's control plane", "the body of a frame"


class FrameKind(IntEnum):
    """The kind of a frame, with its payload type in brackets; worker.proto uses the same names."""

    START = 1  # master to each worker: abandon earlier epochs and prepare for this one [Start]
    MESSAGE = 2  # master to worker 1, worker to worker: run an iteration [Iteration]
    READY = 3  # worker to master: new caches are in place and the epoch may begin [None]
    RECEIVED = 4  # worker to master: it has the message and has forwarded it [StageTime]
    DONE = 5  # worker to master: it has computed its part; the last stage sends TOKENS instead [StageTime]
    TOKENS = 6  # last worker to master: the iteration is computed [Tokens]
    TROUBLE = 7  # worker to master: it has abandoned the epoch [str: why]
    WORDS = 8  # master to the last worker: masks of the tokens that constrained rows allow [bytes: int32]
    PASSED = 9  # worker to master: a START was stale; this frame carries the later epoch it knows [None]


START, MESSAGE, READY, RECEIVED, DONE, TOKENS, TROUBLE, WORDS, PASSED = FrameKind
_FIELD_OF = {kind: kind.name.lower() for kind in FrameKind}
_KIND_OF = {field: kind for kind, field in _FIELD_OF.items()}


class Frame(NamedTuple):
    """`stage` is the sender's stage, from 0; the engine master sends 0."""

    kind: FrameKind
    epoch: int
    iteration: int = 0
    stage: int = 0
    payload: Any = None  # FrameKind gives its type; None is sent as an empty message


class StageTime(NamedTuple):
    """When a stage received an iteration's message or finished its part, in seconds on its worker's clock.

    `link_bytes` counts the bytes that a finished stage put on the link to the next one; 0 on receipt.
    `routed` are the experts that a finished stage's tokens chose, if rows ask (sampled_wire.py).
    """

    seconds: float
    link_bytes: int
    routed: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """Serialize a frame for gRPC."""
    body = worker_pb2.Body(epoch=frame.epoch, iteration=frame.iteration, stage=frame.stage)
    field, payload = _FIELD_OF[frame.kind], frame.payload
    if isinstance(payload, str | bytes):
        setattr(body, field, payload)
    elif payload is None:
        getattr(body, field).SetInParent()
    else:
        getattr(body, field).CopyFrom(payload)
    data = body.SerializeToString()
    whole = worker_pb2.Frame(version=PROTOCOL_VERSION, checksum=zlib.crc32(data), body=data)
    return whole.SerializeToString()


def decode_frame(data: bytes) -> Frame:
    """Parse and check a frame. Raises BadFrame."""
    whole = parsed(worker_pb2.Frame, data, MAX_FRAME, _FRAME)
    version = _version(whole)  # checked first: a later version may have more fields
    if version != PROTOCOL_VERSION:
        message = f"the frame has protocol version {version}, and this side uses {PROTOCOL_VERSION}; "
        raise BadFrame(message + "run the same version of orca_jax everywhere")
    check_exact(whole, data, _FRAME)
    inner = whole.body
    if whole.checksum != zlib.crc32(inner):
        raise BadFrame("the frame is corrupt: its checksum does not match")
    body = parsed(worker_pb2.Body, inner, MAX_FRAME, _BODY)
    check_exact(body, inner, _BODY)
    field = body.WhichOneof("kind")
    if field is None:
        raise BadFrame("the frame is of an unknown kind")
    kind = _KIND_OF[field]
    payload = None if kind in (READY, PASSED) else getattr(body, field)
    return Frame(kind, body.epoch, body.iteration, body.stage, payload)


def parsed(kind: type[M], data: bytes, limit: int, what: str) -> M:
    """Parse at most `limit` bytes. Raises BadFrame, whose text calls the message `what`."""
    if len(data) > limit:
        raise BadFrame(f"{what} has {len(data)} bytes; up to {limit} are allowed")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadFrame(f"the bytes are not {what}") from error


def check_exact(message: Message, data: bytes, what: str) -> None:
    """Raise BadFrame if the message's bytes hold unknown fields, or the same field twice."""
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data):
        raise BadFrame(f"the bytes are not {what}: they hold unknown or repeated fields")


def _version(whole: worker_pb2.Frame) -> int:
    old = whole.up_to_version_4
    if len(old) >= _UP_TO_VERSION_4.size:
        magic, version = _UP_TO_VERSION_4.unpack_from(old)
        if magic == _MAGIC:
            return version
    if old or not whole.version:
        raise BadFrame(f"the bytes are not {_FRAME}")
    return whole.version


def encode_stage_time(time: StageTime) -> worker_pb2.StageTime:
    """Encode the payload of RECEIVED and DONE."""
    return worker_pb2.StageTime(seconds=time.seconds, link_bytes=time.link_bytes, routed=time.routed)


def decode_stage_time(payload: worker_pb2.StageTime) -> StageTime:
    """Decode the payload of RECEIVED and DONE. Raises BadFrame."""
    if not payload.HasField("seconds"):
        raise BadFrame("a stage time has no seconds")
    if not 0 <= payload.seconds < math.inf:
        raise BadFrame(f"a stage time is {payload.seconds} seconds; it must be finite and at least 0")
    return StageTime(payload.seconds, payload.link_bytes, payload.routed)
