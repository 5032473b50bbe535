"""What the two ends of a control line must agree on before the first frame, and what gRPC is told about it.

It goes as the metadata of the call. The secret is a password, and crosses the network as it is: a line over a
network that others can read needs a tunnel.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from ipaddress import ip_address
from typing import Any, NamedTuple, cast, get_args

from orca_jax.config import Attention
from orca_jax.control.frame import HEADER_BYTES, MAX_PAYLOAD, PROTOCOL_VERSION
from orca_jax.control.worker_pb2 import Frame
from orca_jax.errors import ConfigError
from orca_jax.families.model_config import ModelConfig

METHOD = "/orca.v1.Worker/Frames"
MASTER, PREVIOUS = "master", "previous"  # who calls: the engine master, or the worker of the stage before
JOINED = b""  # the worker's first message: it has taken the caller
MAX_MESSAGE = MAX_PAYLOAD + HEADER_BYTES  # bytes of a frame
_AROUND = 16  # bytes of protobuf around it, at most
MAX_SECRET = 1024  # bytes
_MAX_VALUE = 200  # characters of one that is shown
_MAX_ABOUT = 4096  # bytes; gRPC takes no more than twice that
_MAX_BYTES = 1 << 50  # of a device's memory
_MAX_DEVICES = 1024
_MAX_DATA_ADDRESS = 1000  # bytes

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

_ROLE, _SECRET, _TERMS, _DATA = "orca-role", "orca-secret-bin", "orca-terms-bin", "orca-data-bin"
_ABOUT = "orca-about-bin"
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """What a stage is: both ends of a line to its worker state it, each from its own configuration.

    `stage` counts from 0, its layers are `first_layer` to `first_layer + n_layers - 1`; `model` is the
    model's name and `digest` that of its configuration. A caller whose `dtype` is None takes any.
    """

    model: str
    digest: str
    dtype: str | None
    stage: int
    n_stages: int
    first_layer: int
    n_layers: int

    def fields(self) -> dict[str, str | int | None]:
        """Every field by its name, behind the protocol's version; the stage counts from 1, for people."""
        return {"protocol_version": PROTOCOL_VERSION, **asdict(self), "stage": self.stage + 1}


@dataclass(frozen=True, slots=True)
class WorkerAbout:
    """What a worker says of itself when it takes a caller.

    `room` is in bytes, what each of its `n_devices` has beside the weights, and `modest` what keys and values
    may take of it at most; None: it does not say, or there is no such bound. `device` is what one is called,
    `attention` how attention runs there, and `path` which kind of attention that is.
    """

    dtype: str
    room: int | None
    modest: int | None
    n_devices: int
    device: str
    attention: str
    path: Attention


class ControlAddress(NamedTuple):
    """Where a worker takes calls: a host and a port, or the path of a unix socket, and "" for the host."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        """As it is written, and as gRPC takes it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_local(self) -> bool:
        """Whether nobody on another machine can reach it."""
        try:
            return bool(self.path) or ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def control_address(text: str) -> ControlAddress:
    """The address "host:port", "[v6]:port" or "unix:/absolute/path". Raises ConfigError."""
    plain = text.isprintable() and not set(text) & set(" %?#,")  # what gRPC would read in its own way
    scheme, _, path = text.partition(":")
    if plain and scheme == "unix" and path.startswith("/"):
        return ControlAddress("", 0, path)
    host, _, port = text.rpartition(":")
    numbered = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        named = _is_ipv6(host)
    else:
        named = host not in ("", "unix") and not set(host) & set(":/[]")
    if plain and numbered and named:
        return ControlAddress(host, int(port))
    message = f"a worker's address is {text[:_MAX_VALUE]!r}; it must be host:port, [IPv6 address]:port or "
    raise ConfigError(message + "unix:/absolute/path")


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


def model_digest(config: ModelConfig) -> str:
    """A digest of all that a ModelConfig says, but for how a table is padded to be split over devices."""
    said = asdict(config)
    del said["vocab_multiple"]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def to_message(frame: bytes) -> bytes:
    """A frame as the message of worker.proto."""
    return Frame(frame=frame).SerializeToString()


def from_message(message: bytes) -> bytes:
    """The frame in a message; gRPC ends the call where it raises."""
    return Frame.FromString(message).frame


def metadata(role: str, terms: JoinTerms, secret: str, data_address: str = "") -> Metadata:
    """What a caller sends along; one of the stage before with the address that its hidden states are at."""
    said = (
        (_ROLE, role),
        (_SECRET, secret.encode()),
        (_TERMS, json.dumps(terms.fields()).encode()),
    )
    return (*said, (_DATA, data_address.encode())) if role == PREVIOUS else said


def data_address_of(found: dict[str, str | bytes]) -> str | None:
    """The data address in a caller's metadata, "" where there is none; None for one that cannot be."""
    value = found.get(_DATA, b"")
    value = value.encode() if isinstance(value, str) else value
    try:
        address = value.decode()
    except UnicodeDecodeError:
        return None
    return address if len(value) <= _MAX_DATA_ADDRESS and address.isprintable() else None


def about_metadata(about: WorkerAbout) -> Metadata:
    """What a worker sends to a caller that it takes, before the first message."""
    return ((_ABOUT, json.dumps(asdict(about)).encode()),)


def about_of(found: Iterable[tuple[str, str | bytes]]) -> WorkerAbout | None:
    """What a worker's metadata says of it; None where that is not what a worker says."""
    said = dict(found).get(_ABOUT, b"")
    if len(said) > _MAX_ABOUT:
        return None
    try:
        read: object = json.loads(said)
    except (ValueError, RecursionError):
        return None
    about = cast("dict[str, Any] | None", read if isinstance(read, dict) else None)
    if about is None or about.keys() != {field.name for field in fields(WorkerAbout)}:
        return None
    texts = all(isinstance(about[name], str) for name in ("dtype", "device", "attention"))
    bounds = {"room": (0, _MAX_BYTES), "modest": (0, _MAX_BYTES), "n_devices": (1, _MAX_DEVICES)}
    numbers = all(
        type(about[name]) is int and low <= about[name] <= high
        for name, (low, high) in bounds.items()
        if name == "n_devices" or about[name] is not None
    )
    known = about["room"] is not None or about["modest"] is not None
    if not (texts and numbers and known and about["path"] in get_args(Attention)):
        return None
    return WorkerAbout(**about)


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
        if name == "dtype" and name in theirs and value is None:
            continue  # any
        if type(value) is not type(expected) or value != expected:
            shown = "nothing" if value is None else repr(value)[:_MAX_VALUE]
            expected = repr(expected)[:_MAX_VALUE]
            return f"{name}: this worker has {expected}, and the caller {shown}; start both with the same"
    return None
