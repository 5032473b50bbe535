"""The frames of the control plane: what the engine master and its workers say to each other.

A frame is a header of fixed size and a payload. It carries its epoch, iteration and stage, so that what
comes late can be told from what is due, and a checksum, so that nothing that was damaged on its way is acted
on. Iterations are counted from 0 in each epoch.
"""

import math
import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from orca_jax.errors import BadFrame

PROTOCOL_VERSION = 4
MAX_PAYLOAD = (
    512 << 20
)  # bytes; an engine whose iterations could need more is refused (engine/remote_pipeline.py)
MAX_EPOCH = 1 << 63  # far above the nanoseconds since 1970 that an engine master begins at
_MAGIC = 0x0CA1
_HEADER = struct.Struct("<HBBHHQQII")  # magic, version, kind, stage, 0, epoch, iteration, length, checksum
_CHECKSUM_AT = _HEADER.size - 4
HEADER_BYTES = _HEADER.size
_STAGE_TIME = struct.Struct("<dQ")


class FrameKind(IntEnum):
    """What a frame says; the payload in brackets."""

    START = 1  # master to each worker: give up every epoch before, be ready for this one [a StartOrder]
    MESSAGE = 2  # master to worker 1, worker to worker: run an iteration [a control message]
    READY = 3  # worker to master, as all from here on: caches are new, the epoch may begin [nothing]
    RECEIVED = 4  # the iteration's message is here, and was passed on if that is not held back [a StageTime]
    DONE = 5  # this stage's part of the iteration is computed; the last stage sends TOKENS [a StageTime]
    TOKENS = 6  # from the last stage alone: the iteration is computed, and what it sampled is this [Sampled]
    TROUBLE = 7  # this worker has given the epoch up [why, UTF-8]
    WORDS = 8  # master to the last worker: what may be sampled in an iteration that it waits for [bits]
    PASSED = 9  # worker to master: it has known a later epoch than that of a START, and this is it [nothing]


START, MESSAGE, READY, RECEIVED, DONE, TOKENS, TROUBLE, WORDS, PASSED = FrameKind


class Frame(NamedTuple):
    """One frame. `stage` is the sender's, counted from 0, and 0 where the master sends."""

    kind: FrameKind
    epoch: int
    iteration: int = 0
    stage: int = 0
    payload: bytes = b""


class StageTime(NamedTuple):
    """When a stage took an iteration's message, or finished its part, in seconds of its worker's own clock.

    `link_bytes` are what the stage then has put on the link to the next one for it: 0 when it took it.
    """

    seconds: float
    link_bytes: int


def encode_frame(frame: Frame) -> bytes:
    """The frame's bytes."""
    length = len(frame.payload)
    assert length <= MAX_PAYLOAD, f"{length} bytes"
    header = _HEADER.pack(
        _MAGIC, PROTOCOL_VERSION, frame.kind, frame.stage, 0, frame.epoch, frame.iteration, length, 0
    )[:_CHECKSUM_AT]
    checksum = zlib.crc32(frame.payload, zlib.crc32(header))
    return b"".join((header, checksum.to_bytes(4, "little"), frame.payload))


def decode_frame(data: bytes) -> Frame:
    """The frame that these bytes are. Raises BadFrame."""
    if len(data) < HEADER_BYTES:
        raise BadFrame(f"{len(data)} bytes came; a frame has {HEADER_BYTES} at least")
    magic, version, kind, stage, zero, epoch, iteration, length, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BadFrame("the bytes are no frame of orca_jax's control plane")
    if version != PROTOCOL_VERSION:
        message = f"the frame is of protocol version {version}, and this side speaks {PROTOCOL_VERSION}; "
        raise BadFrame(message + "run the same orca_jax everywhere")
    if length > MAX_PAYLOAD or length != len(data) - HEADER_BYTES:
        message = f"the header says {length} bytes of payload, and {len(data) - HEADER_BYTES} came; "
        raise BadFrame(message + f"up to {MAX_PAYLOAD} are allowed")
    payload = data[HEADER_BYTES:]
    if checksum != zlib.crc32(payload, zlib.crc32(data[:_CHECKSUM_AT])):
        raise BadFrame("the frame was damaged: its checksum is wrong")
    if not START <= kind <= PASSED or zero:
        raise BadFrame(f"the frame is of kind {kind}, which is not known")
    return Frame(FrameKind(kind), epoch, iteration, stage, payload)


def encode_stage_time(time: StageTime) -> bytes:
    """The time as a payload."""
    return _STAGE_TIME.pack(*time)


def decode_stage_time(payload: bytes) -> StageTime:
    """The time that these bytes are. Raises BadFrame."""
    if len(payload) != _STAGE_TIME.size:
        raise BadFrame(f"{len(payload)} bytes of a stage's time came, which has {_STAGE_TIME.size}")
    time = StageTime(*_STAGE_TIME.unpack(payload))
    if not 0 <= time.seconds < math.inf:
        raise BadFrame(f"a stage's time came that is {time.seconds} seconds")
    return time
