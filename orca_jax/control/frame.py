"""The frames of the control plane: what the engine master and its workers say to each other (worker.proto).

A frame carries its epoch, iteration and stage, so that what comes late is told from what is due, and a
checksum over them and its payload. gRPC adds none, and TCP's 16 bits miss damage that this one finds; a
control message that is damaged and still in range would overwrite another request's keys and values.
"""

import math
import struct
import zlib
from enum import IntEnum
from typing import Any, NamedTuple

from orca_jax.control import worker_pb2
from orca_jax.control.parsing import check_exact, parsed
from orca_jax.errors import BadFrame

PROTOCOL_VERSION = 5
MAX_FRAME = 512 << 20  # bytes; an engine that could need more is refused (engine/remote_pipeline.py)
FRAME_BYTES = 64  # more than a frame takes around its payload
MAX_EPOCH = 1 << 63  # far above the nanoseconds since 1970 that an engine master begins at
_UP_TO_VERSION_4 = struct.Struct("<HB")  # how those frames begin: magic, version
_MAGIC = 0x0CA1
_FRAME, _BODY = "a frame of orca_jax's control plane", "the body of a frame"


class FrameKind(IntEnum):
    """What a frame says, with the type of its payload in brackets; worker.proto has the same names."""

    START = 1  # master to each worker: give up every epoch before, be ready for this one [Start]
    MESSAGE = 2  # master to worker 1, worker to worker: run an iteration [Iteration]
    READY = 3  # worker to master, as all from here on: caches are new, the epoch may begin [None]
    RECEIVED = 4  # the iteration's message is here, and was passed on unless that is held back [StageTime]
    DONE = 5  # this stage's part is computed; the last stage sends TOKENS instead [StageTime]
    TOKENS = 6  # from the last stage alone: the iteration is computed [Tokens]
    TROUBLE = 7  # this worker has given the epoch up [str: why]
    WORDS = 8  # master to the last worker: what may be sampled in an iteration [bytes: int32]
    PASSED = 9  # worker to master: it has known a later epoch than that of a START, this one [None]


START, MESSAGE, READY, RECEIVED, DONE, TOKENS, TROUBLE, WORDS, PASSED = FrameKind
_FIELD_OF = {kind: kind.name.lower() for kind in FrameKind}
_KIND_OF = {field: kind for kind, field in _FIELD_OF.items()}


class Frame(NamedTuple):
    """One frame. `stage` is the sender's, counted from 0; the engine master sends as 0."""

    kind: FrameKind
    epoch: int
    iteration: int = 0
    stage: int = 0
    payload: Any = None  # of the type that FrameKind says; None is sent as a message without its fields


class StageTime(NamedTuple):
    """When a stage took an iteration's message, or finished its part, in seconds of its worker's own clock.

    `link_bytes` counts what a stage that has finished put on the link to the next one: 0 where it took it.
    """

    seconds: float
    link_bytes: int


def encode_frame(frame: Frame) -> bytes:
    """The frame as gRPC sends it."""
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
    """The frame that these bytes are. Raises BadFrame."""
    whole = parsed(worker_pb2.Frame, data, MAX_FRAME, _FRAME)
    version = _version(whole)  # first: a later one may have more fields
    if version != PROTOCOL_VERSION:
        message = f"the frame is of protocol version {version}, and this side speaks {PROTOCOL_VERSION}; "
        raise BadFrame(message + "run the same orca_jax everywhere")
    check_exact(whole, data, _FRAME)
    inner = whole.body
    if whole.checksum != zlib.crc32(inner):
        raise BadFrame("the frame was damaged: its checksum is wrong")
    body = parsed(worker_pb2.Body, inner, MAX_FRAME, _BODY)
    check_exact(body, inner, _BODY)
    field = body.WhichOneof("kind")
    if field is None:
        raise BadFrame("the frame is of a kind that is not known")
    kind = _KIND_OF[field]
    payload = None if kind in (READY, PASSED) else getattr(body, field)
    return Frame(kind, body.epoch, body.iteration, body.stage, payload)


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
    """The time as a payload."""
    return worker_pb2.StageTime(seconds=time.seconds, link_bytes=time.link_bytes)


def decode_stage_time(payload: worker_pb2.StageTime) -> StageTime:
    """The time that this payload is. Raises BadFrame."""
    if not payload.HasField("seconds"):
        raise BadFrame("a stage's time came without its seconds")
    if not 0 <= payload.seconds < math.inf:
        raise BadFrame(f"a stage's time came that is {payload.seconds} seconds")
    return StageTime(payload.seconds, payload.link_bytes)
