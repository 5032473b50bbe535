"""The handshake of a control line: call metadata in which both ends agree before the first frame.

worker.proto defines it. The secret is a password sent in clear text: use a tunnel on a network that others
can read.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple, cast, get_args

from orca_jax.config import Attention
from orca_jax.control.frame import MAX_FRAME, PROTOCOL_VERSION, check_exact, parsed
from orca_jax.control.worker_pb2 import About, Join
from orca_jax.errors import BadFrame, ConfigError
from orca_jax.families.model_config import ModelConfig

METHOD = "/orca.v1.Worker/Frames"
MASTER, PREVIOUS = "master", "previous"  # the caller: the engine master, or the previous stage's worker
JOINED = b""  # the worker's first frame, which is empty: it has accepted the caller
MAX_SECRET = 1024  # bytes
_MAX_VALUE = 200  # characters of a value in an error message
_MAX_METADATA = 8192  # bytes of one entry; gRPC allows no more for all entries together
_MAX_ABOUT = 4096  # bytes
_MAX_BYTES = 1 << 50  # a device's memory
_MAX_DEVICES = 1024
_MAX_DATA_ADDRESS = 1000  # bytes

# Times are in milliseconds. Each side notices within ten seconds that its peer has vanished. gRPC's own
# threads answer pings, so a worker that compiles for minutes still counts as alive. Control lines ignore
# proxy variables, and only one worker may listen on a port.
OPTIONS = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # otherwise a ping may take a minute despite the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
)

_SECRET, _VERSION, _JOIN, _ABOUT = "orca-secret-bin", "orca-terms-bin", "orca-join-bin", "orca-about-bin"
_VERSION_KEY = "protocol_version"
_UNREADABLE = "the caller's terms are missing or unreadable; run the same version of orca_jax everywhere"
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTerms:
    """A stage's computation. Both ends of a line derive it from their own configuration and must agree.

    `stage` counts from 0; its layers are `first_layer` to `first_layer + n_layers - 1`. `model` is the
    model's name, and `digest` the hash of its configuration. A caller whose `dtype` is None accepts any.
    """

    model: str
    digest: str
    dtype: str | None
    stage: int
    n_stages: int
    first_layer: int
    n_layers: int


@dataclass(frozen=True, slots=True)
class WorkerAbout:
    """A worker's report about itself when it accepts a caller.

    `room` is the memory in bytes that each of its `n_devices` has left after the weights, None if unknown.
    `modest` bounds the part of `room` that the KV cache may take; None means no such bound. `device` is a
    device's name, `attention` describes how attention runs there, and `path` is the kind of attention.
    """

    dtype: str
    room: int | None
    modest: int | None
    n_devices: int
    device: str
    attention: str
    path: Attention


class ControlAddress(NamedTuple):
    """The address where a worker takes calls: host and port, or with host "" the path of a unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        """The address in the form that `control_address` and gRPC read."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return bool(self.path) or ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def control_address(text: str) -> ControlAddress:
    """Parse "host:port", "[v6]:port" or "unix:/absolute/path". Raises ConfigError."""
    plain = text.isprintable() and not set(text) & set(" %?#,")  # gRPC would interpret these
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
    """A digest of what a worker needs to know of a ModelConfig.

    Leaves out special tokens and what depends on the devices that share a stage.
    """
    shape = asdict(config.as_stored())
    for name in ("vocab_multiple", "bos_token_id", "eos_token_ids"):
        del shape[name]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]


def metadata(role: str, terms: JoinTerms, secret: str, data_address: str = "") -> Metadata:
    """A caller's metadata; `data_address` is where the previous stage's worker offers hidden states."""
    join = Join(**_stated(terms), role=role, data_address=data_address if role == PREVIOUS else "")
    return (
        (_SECRET, secret.encode()),
        (_VERSION, json.dumps({_VERSION_KEY: PROTOCOL_VERSION}).encode()),
        (_JOIN, join.SerializeToString()),
    )


def _stated(terms: JoinTerms) -> dict[str, Any]:
    """The terms as the fields of a Join: there the stage counts from 1, and dtype "" means any."""
    return {**asdict(terms), "stage": terms.stage + 1, "dtype": terms.dtype or ""}


def role_of(sent: Mapping[str, str | bytes]) -> str:
    """The role that a caller claims; "" if it sent no readable Join."""
    join = _join_of(sent)
    return join.role if join else ""


def data_address_of(sent: Mapping[str, str | bytes]) -> str | None:
    """The data address in a caller's metadata: "" if absent, None if unreadable."""
    join = _join_of(sent)
    if join is None:
        return None
    address = join.data_address
    return address if len(address.encode()) <= _MAX_DATA_ADDRESS and address.isprintable() else None


def _join_of(sent: Mapping[str, str | bytes]) -> Join | None:
    data = _bytes_of(sent, _JOIN)
    try:
        join = parsed(Join, data, _MAX_METADATA, "a Join")
        check_exact(join, data, "a Join")
    except BadFrame:
        return None
    return join if data else None


def _bytes_of(sent: Mapping[str, str | bytes], name: str) -> bytes:
    value = sent.get(name, b"")
    return value.encode() if isinstance(value, str) else value


def about_metadata(about: WorkerAbout) -> Metadata:
    """The metadata that a worker sends before its first frame."""
    return ((_ABOUT, About(**asdict(about)).SerializeToString()),)


def about_of(sent: Iterable[tuple[str, str | bytes]]) -> WorkerAbout | None:
    """Parse what a worker reports about itself in its metadata; None if it is malformed or out of range."""
    data = _bytes_of(dict(sent), _ABOUT)
    try:
        about = parsed(About, data, _MAX_ABOUT, "an About")
        check_exact(about, data, "an About")
    except BadFrame:
        return None
    room = about.room if about.HasField("room") else None
    modest = about.modest if about.HasField("modest") else None
    known = [n_bytes for n_bytes in (room, modest) if n_bytes is not None]
    possible = known and max(known) <= _MAX_BYTES and 1 <= about.n_devices <= _MAX_DEVICES
    if not possible or about.path not in get_args(Attention):
        return None
    return WorkerAbout(
        dtype=about.dtype,
        room=room,
        modest=modest,
        n_devices=about.n_devices,
        device=about.device,
        attention=about.attention,
        path=cast("Attention", about.path),
    )


def has_secret(sent: Mapping[str, str | bytes], secret: str) -> bool:
    """Whether a caller's metadata has the secret; a constant-time comparison."""
    return hmac.compare_digest(_bytes_of(sent, _SECRET), secret.encode())


def disagreement(sent: Mapping[str, str | bytes], terms: JoinTerms) -> str | None:
    """Describe the first term that differs, with both values; None if all agree."""
    try:
        stated = json.loads(_bytes_of(sent, _VERSION))
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        return _UNREADABLE
    version = cast("dict[str, Any]", stated).get(_VERSION_KEY)
    if type(version) is not int or version != PROTOCOL_VERSION:
        return _difference(_VERSION_KEY, PROTOCOL_VERSION, version)
    join = _join_of(sent)
    if join is None:
        return _UNREADABLE
    for name, expected in _stated(terms).items():
        value = getattr(join, name) if join.HasField(name) else None
        if name == "dtype" and value == "":
            continue  # any
        if value != expected:
            return _difference(name, expected, value)
    return None


def _difference(name: str, expected: object, value: object) -> str:
    shown = "nothing" if value is None else repr(value)[:_MAX_VALUE]
    here = repr(expected)[:_MAX_VALUE]
    return f"{name}: this worker has {here}, but the caller has {shown}; start both with the same value"
