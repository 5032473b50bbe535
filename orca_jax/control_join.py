"""What the two ends of a control line must agree on before the first frame, and what gRPC is told about it.

It goes as the metadata of the call. The secret is a password, and crosses the network as it is: a line over a
network that others can read needs a tunnel.
"""

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from orca_jax.config import ModelConfig
from orca_jax.control_frame import PROTOCOL_VERSION
from orca_jax.control_wire import ControlWire
from orca_jax.worker_pb2 import Frame

METHOD = "/orca.v1.Worker/Frames"
MASTER, PREVIOUS = "master", "previous"  # who calls: the engine master, or the worker of the stage before
JOINED = b""  # the worker's first message: it has taken the caller
MAX_MESSAGE = 16 << 20  # bytes of a frame
_AROUND = 16  # bytes of protobuf around it, at most
MAX_SECRET = 1024  # bytes
_MAX_VALUE = 200  # characters of one that is shown

# Times in milliseconds. A peer that vanished without a word is noticed within ten seconds, by either side;
# gRPC's own threads answer, so that one which compiles for minutes is not taken for dead. A proxy of the
# environment is not for these lines, and a port is one worker's alone.
OPTIONS = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # or a ping has a minute, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE + _AROUND),
    ("grpc.max_send_message_length", MAX_MESSAGE + _AROUND),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
)

_ROLE, _SECRET, _TERMS = "orca-role", "orca-secret-bin", "orca-terms-bin"
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """What a stage is: both ends of a line to its worker state it, each from its own configuration.

    `stage` counts from 0, its layers are `first_layer` to `first_layer + n_layers - 1`; `model` is the
    model's name and `digest` that of its configuration.
    """

    model: str
    digest: str
    dtype: str
    stage: int
    n_stages: int
    first_layer: int
    n_layers: int
    wire: ControlWire

    def fields(self) -> dict[str, str | int]:
        """Every field by its name, with those of the wire and the protocol's version, which comes first."""
        own = asdict(self)
        wire = own.pop("wire")
        return {"protocol_version": PROTOCOL_VERSION, **own, **wire}


def model_digest(config: ModelConfig) -> str:
    """A digest of all that a ModelConfig says."""
    text = json.dumps(asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def to_message(frame: bytes) -> bytes:
    """A frame as the message of worker.proto."""
    return Frame(frame=frame).SerializeToString()


def from_message(message: bytes) -> bytes:
    """The frame in a message; gRPC ends the call where it raises."""
    return Frame.FromString(message).frame


def metadata(role: str, terms: JoinTerms, secret: str) -> Metadata:
    """What a caller sends along."""
    return (
        (_ROLE, role),
        (_SECRET, secret.encode()),
        (_TERMS, json.dumps(terms.fields()).encode()),
    )


def has_secret(found: dict[str, str | bytes], secret: str) -> bool:
    """Whether a caller's metadata has the secret; how long that takes tells nothing of its characters."""
    value = found.get(_SECRET, b"")
    value = value.encode() if isinstance(value, str) else value
    return hmac.compare_digest(value, secret.encode())


def role_of(found: dict[str, str | bytes]) -> str:
    """Who a caller says it is."""
    return str(found.get(_ROLE, ""))


def disagreement(found: dict[str, str | bytes], terms: JoinTerms) -> str | None:
    """The first field in which a caller's terms are not these, with both values; None where all agree."""
    try:
        theirs = json.loads(found.get(_TERMS, b""))
    except (ValueError, RecursionError):
        theirs = None
    if not isinstance(theirs, dict):
        return "the caller sent no terms that can be read; run the same orca_jax everywhere"
    theirs = cast("dict[str, Any]", theirs)
    for name, expected in terms.fields().items():
        value = theirs.get(name)
        if type(value) is not type(expected) or value != expected:
            shown = "nothing" if value is None else repr(value)[:_MAX_VALUE]
            expected = repr(expected)[:_MAX_VALUE]
            return f"{name}: this worker has {expected}, and the caller {shown}; start both with the same"
    return None
