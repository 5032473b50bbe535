"""Control lines on loopback, with real gRPC servers at the other end."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

import grpc
import pytest

from orca_jax.control import handshake, line, port
from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.frame import MAX_FRAME, decode_frame
from orca_jax.control.handshake import (
    JOINED,
    MASTER,
    OPTIONS,
    PREVIOUS,
    JoinTerms,
    WorkerAbout,
    model_digest,
)
from orca_jax.control.line import ControlLine, LineLimits
from orca_jax.control.port import ControlPort
from orca_jax.control.worker_pb2 import About, Join
from orca_jax.engine import grpc_channel
from orca_jax.engine.grpc_channel import ControlChannel
from orca_jax.engine.remote_workers import Arrival, Channel
from orca_jax.errors import BadFrame, ConfigError, EngineError, WorkerRefused, WorkerUnreachable
from orca_jax.request.sampled import LOGPROBS
from tests.gpt_config import changed_config, gpt_config
from tests.places import ROOT

SOON = 20.0  # seconds; what is waited for comes in milliseconds
SECRET = "a secret, ünequal to others"
MODEL = gpt_config(vocab_size=100, n_positions=64, hidden_size=8, n_layers=4, n_heads=2, ffn_size=16)
LIMITS = LineLimits(join_seconds=2.0, first_delay=0.02, longest_delay=0.1)
FIRST = JoinTerms(
    model="tiny",
    digest=model_digest(MODEL),
    dtype="float32",
    stage=0,
    n_stages=2,
    first_layer=0,
    n_layers=2,
)
SECOND = replace(FIRST, stage=1, first_layer=2)
ABOUT = WorkerAbout(
    dtype="float32",
    room=1 << 40,
    modest=1234,
    n_devices=2,
    device="a cpu, ünlike others",
    attention="pure JAX",
    path="static",
)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Closes everything that a test opened, and checks that no thread remains."""
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield stack
    eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.is_alive()])


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


class Listening(ControlPort):
    """A worker's port that puts what arrives into a queue."""

    def __init__(self, address: str, terms: JoinTerms, *, secret: str, frames: int) -> None:
        inbox = FrameQueue[bytes](frames)
        super().__init__(address, terms=terms, secret=secret, deliver=inbox.put, frames=frames)
        self.receive = inbox.get
        self.port = int(self.address.rpartition(":")[2]) if self.address.startswith("127.") else 0


def listen(
    ends: ExitStack,
    terms: JoinTerms = FIRST,
    *,
    secret: str = SECRET,
    address: str = "127.0.0.1:0",
    frames: int = 4096,
    about: WorkerAbout | None = ABOUT,
) -> Listening:
    """Listen as a worker; the port accepts calls unless `about` is None."""
    worker = Listening(address, terms, secret=secret, frames=frames)
    ends.callback(worker.close)
    if about is not None:
        worker.open(about)
    return worker


def join(
    ends: ExitStack,
    *workers: Listening,
    terms: tuple[JoinTerms, ...] = (FIRST, SECOND),
    secret: str = SECRET,
    seconds: float = SOON,
    limits: LineLimits = LIMITS,
) -> ControlChannel:
    addresses = [worker.address for worker in workers]
    channel = ControlChannel(
        lambda: addresses, terms[: len(workers)], secret=secret, seconds=seconds, limits=limits
    )
    ends.callback(channel.close)
    return channel


def works(channel: Channel, worker: Listening, stage: int = 0) -> bool:
    channel.send(stage, b"there")
    worker.report(b"back")
    there = worker.receive(SOON) == b"there"
    return there and channel.receive(SOON) == Arrival(stage, b"back")


def test_frames_go_both_ways_in_order(ends: ExitStack) -> None:
    first, second = listen(ends), listen(ends, SECOND)
    channel = join(ends, first, second)
    there = [b"%d" % i for i in range(500)]
    for data in there:
        channel.send(0, data)
        channel.send(1, data + b"!")
        first.report(data + b"?")
    assert [first.receive(SOON) for _ in there] == there
    assert [second.receive(SOON) for _ in there] == [data + b"!" for data in there]
    assert [channel.receive(SOON) for _ in there] == [Arrival(0, data + b"?") for data in there]
    second.report(b"")
    assert channel.receive(SOON) == Arrival(1, b"")
    assert channel.receive(0.0) is None
    assert first.receive(0.0) is None


def test_a_worker_calls_the_next_one(ends: ExitStack) -> None:
    second = listen(ends, SECOND)
    reported = list[object]()

    def deliver(data: bytes | None, why: str) -> bool:
        reported.append((data, why))
        return True

    forward = ControlLine(
        second.address, role=PREVIOUS, terms=SECOND, secret=SECRET, deliver=deliver, limits=LIMITS
    )
    ends.callback(forward.close)
    assert forward.wait_joined(SOON)
    forward.send(b"on")
    second.report(b"there is no master yet")
    assert second.receive(SOON) == b"on"
    assert reported == []


def test_large_frames_pass_and_larger_ones_break_the_line(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of a prompt of 200,000 tokens take 34 MB."""
    assert 200_000 * LOGPROBS.itemsize < MAX_FRAME
    most = 34 << 20
    for module in (line, port):
        monkeypatch.setattr(module, "MAX_FRAME", most)
    worker = listen(ends)
    channel = join(ends, worker)
    large = bytes(range(256)) * (most // 256)
    channel.send(0, large)
    assert worker.receive(SOON) == large
    worker.report(large)
    assert channel.receive(SOON) == Arrival(0, large)
    channel.send(0, large + b"x")
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.data is None
    assert f"{most + 1} bytes" in arrival.why
    eventually(lambda: rejoined(channel, worker))
    worker.report(large + b"x")
    eventually(lambda: (result := channel.receive(SOON)) is not None and "allowed" in result.why)


def rejoined(channel: Channel, worker: Listening) -> bool:
    channel.send(0, b"again")
    return worker.receive(0.05) == b"again"


def test_a_broken_line_is_reported_once_and_reconnected(ends: ExitStack) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    assert works(channel, worker)
    worker.close()
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.stage == 0 and arrival.data is None and arrival.why
    channel.send(0, b"dropped")
    assert channel.receive(0.5) is None  # several attempts later
    worker = listen(ends, address=worker.address)
    eventually(lambda: rejoined(channel, worker))
    while worker.receive(0.2) is not None:
        pass
    assert works(channel, worker)


def test_another_worker_at_the_address_is_reported(ends: ExitStack) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    worker.close()
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.data is None
    worker = listen(ends, replace(FIRST, dtype="bfloat16"), address=worker.address)
    refusal = channel.receive(SOON)
    assert refusal is not None and refusal.data is None
    assert "dtype: this worker has 'bfloat16', but the caller has 'float32'" in refusal.why
    for _ in range(3):
        channel.send(0, b"tries again")
        assert channel.receive(0.1) is None  # an equal report is not repeated
    worker.close()
    worker = listen(ends, address=worker.address)
    eventually(lambda: rejoined(channel, worker))


@pytest.mark.parametrize("secret", ["", "another", SECRET + "x", SECRET[:-1]])
def test_a_wrong_secret_is_refused_without_effect_on_other_connections(ends: ExitStack, secret: str) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    with pytest.raises(
        WorkerRefused, match=r"stage 1 at 127\.0\.0\.1:\d+ refused the connection: .*secret is wrong"
    ) as result:
        join(ends, worker, secret=secret)
    assert SECRET not in str(result.value)
    assert works(channel, worker)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "model: this worker has 'tiny', but the caller has 'other'"),
        ({"digest": "0"}, "digest: this worker has"),
        ({"dtype": "bfloat16"}, "dtype: this worker has 'float32', but the caller has 'bfloat16'"),
        ({"stage": 1}, "stage: this worker has 1, but the caller has 2"),
        ({"n_stages": 4}, "n_stages: this worker has 2, but the caller has 4"),
        ({"first_layer": 1}, "first_layer: this worker has 0, but the caller has 1"),
        ({"n_layers": 3}, "n_layers: this worker has 2, but the caller has 3"),
        ({"digest": None}, "digest: this worker has"),
        ({"first_layer": None}, "first_layer: this worker has 0, but the caller has nothing"),
        ({"model": "m" * 5000}, "model: this worker has 'tiny', but the caller has 'mmm"),
    ],
)
def test_other_terms_are_refused_by_name(ends: ExitStack, change: dict[str, object], named: str) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    with pytest.raises(WorkerRefused) as result:
        join(ends, worker, terms=(replace(FIRST, **change),))  # pyright: ignore[reportArgumentType]
    assert named in str(result.value)
    assert works(channel, worker)


JOIN = Join(
    role="master",
    model="tiny",
    digest=FIRST.digest,
    dtype="float32",
    stage=1,
    n_stages=2,
    first_layer=0,
    n_layers=2,
)


VERSION = 11  # of the wire


def metadata_of(
    join: Join | bytes, version: bytes = b'{"protocol_version": %d}' % VERSION
) -> dict[str, str | bytes]:
    """A caller's terms as gRPC metadata."""
    data = join.SerializeToString() if isinstance(join, Join) else join
    return {"orca-terms-bin": version, "orca-join-bin": data}


def test_another_protocol_version_is_named_first(ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", VERSION + 1)
    sent = dict(handshake.metadata(MASTER, replace(FIRST, dtype="float16"), SECRET))
    monkeypatch.undo()
    why = handshake.disagreement(sent, FIRST)
    assert why is not None and why.startswith(
        f"protocol_version: this worker has {VERSION}, but the caller has {VERSION + 1}"
    )
    sent["orca-join-bin"] = b"\xff what a later version may send"
    assert handshake.disagreement(sent, FIRST) == why


# As version 4 sent it: all terms in JSON.
VERSION_4_TERMS = (
    b'{"protocol_version": 4, "model": "tiny", "digest": "0123", "dtype": "float32", "stage": 1, '
    b'"n_stages": 2, "first_layer": 0, "n_layers": 2}'
)


def test_a_caller_of_the_wire_before_is_refused_by_version(ends: ExitStack) -> None:
    worker = listen(ends)
    sent = (
        ("orca-role", "master"),
        ("orca-secret-bin", SECRET.encode()),
        ("orca-terms-bin", VERSION_4_TERMS),
    )
    with grpc.insecure_channel(worker.address) as stranger:
        call = stranger.stream_stream(handshake.METHOD)(iter([]), metadata=sent, timeout=SOON)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert call.code() is grpc.StatusCode.FAILED_PRECONDITION
    message = (
        f"protocol_version: this worker has {VERSION}, but the caller has 4; start both with the same value"
    )
    assert call.details() == message
    assert works(join(ends, worker), worker)


def test_a_worker_of_the_wire_before_can_refuse_by_version() -> None:
    """An older worker reads just two entries: the secret, and JSON whose first term is the version."""
    sent = dict(handshake.metadata(MASTER, FIRST, SECRET))
    assert sent["orca-secret-bin"] == SECRET.encode()
    assert json.loads(sent["orca-terms-bin"]) == {"protocol_version": VERSION}


@pytest.mark.parametrize(
    "version", [b"", b"[]", b"{", b"\xff", b"[" * 5000, b"{}", b'{"protocol_version": true}']
)
def test_a_version_that_is_rubbish(version: bytes) -> None:
    assert handshake.disagreement(metadata_of(JOIN), FIRST) is None
    why = handshake.disagreement(metadata_of(JOIN, version), FIRST)
    assert why is not None
    assert (
        "terms are missing or unreadable" in why
        or f"protocol_version: this worker has {VERSION}, but the caller has" in why
    )


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff", JOIN.SerializeToString()[:-1], JOIN.SerializeToString() + b"\xa2\x1f\x01x"]
)
def test_terms_that_are_rubbish(data: bytes) -> None:
    why = handshake.disagreement(metadata_of(data), FIRST)
    assert why == "the caller's terms are missing or unreadable; run the same version of orca_jax everywhere"


@pytest.mark.parametrize("name", ["model", "digest", "dtype", "stage", "n_stages", "first_layer", "n_layers"])
def test_a_caller_has_to_state_every_term(name: str) -> None:
    join = Join()
    join.CopyFrom(JOIN)
    join.ClearField(name)  # pyright: ignore[reportArgumentType]
    why = handshake.disagreement(metadata_of(join), FIRST)
    assert why is not None and why.startswith(f"{name}: this worker has ") and "the caller has nothing" in why


def test_a_caller_must_ask_to_accept_any_dtype(ends: ExitStack) -> None:
    worker = listen(ends)
    assert works(join(ends, worker, terms=(replace(FIRST, dtype=None),)), worker)
    other = Join()
    other.CopyFrom(JOIN)
    other.dtype, other.model = "", "other"
    why = handshake.disagreement(metadata_of(other), FIRST)
    assert why is not None and why.startswith("model: ")


def test_a_change_of_the_model_changes_its_digest() -> None:
    assert model_digest(MODEL) == model_digest(replace(MODEL))
    assert model_digest(MODEL) != model_digest(changed_config(MODEL, layer_norm_eps=1e-6))
    assert model_digest(MODEL) == model_digest(replace(MODEL, vocab_multiple=64)), (
        "that is the stage's affair"
    )


# What each end says of itself when it joins


def test_a_worker_identifies_itself_each_time_it_is_joined(ends: ExitStack) -> None:
    first, second = listen(ends), listen(ends, SECOND, about=replace(ABOUT, room=0))
    channel = join(ends, first, second)
    assert channel.about == [ABOUT, replace(ABOUT, room=0)]
    first.close()
    again = listen(ends, address=first.address, about=replace(ABOUT, room=99))
    eventually(lambda: rejoined(channel, again))
    assert [about.room for about in channel.about] == [99, 0]


WHAT = About(dtype="float32", room=5, n_devices=1, device="cpu", attention="as it comes", path="static")


def about(**changed: object) -> bytes:
    """A worker's report about itself with some fields changed, or left out if they are None."""
    message = About()
    message.CopyFrom(WHAT)
    for name, value in changed.items():
        if value is None:
            message.ClearField(name)  # pyright: ignore[reportArgumentType]
        else:
            setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        about()[:-1],
        about() + b"\xa2\x1f\x01x",
        about(room=None),
        *(about(room=n) for n in (1 << 51, (1 << 64) - 1)),
        *(about(modest=n) for n in (1 << 51, (1 << 64) - 1)),
        *(about(n_devices=n) for n in (None, 0, 1025)),
        *(about(path=path) for path in (None, "dense")),
        about(device="x" * 5000),
    ],
)
def test_a_malformed_identity_is_refused(data: bytes) -> None:
    assert handshake.about_of([("orca-about-bin", about())]) == WorkerAbout(
        dtype="float32",
        room=5,
        modest=None,
        n_devices=1,
        device="cpu",
        attention="as it comes",
        path="static",
    )
    assert handshake.about_of([("orca-about-bin", data)]) is None
    assert handshake.about_of([]) is None


@pytest.mark.parametrize(("room", "modest"), [(None, 0), (0, None), (0, 0), (1 << 50, 1 << 50)])
def test_a_worker_reports_the_memory_it_knows(room: int | None, modest: int | None) -> None:
    known = replace(ABOUT, room=room, modest=modest)
    assert handshake.about_of(handshake.about_metadata(known)) == known


def test_a_server_without_an_identity_is_not_a_worker(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "about_metadata", lambda about: (("orca-about-bin", b""),))
    with pytest.raises(WorkerUnreachable, match="it is not an orca_jax worker"):
        join(ends, listen(ends), seconds=1.5)


def previous(ends: ExitStack, second: ControlPort, data_address: str) -> ControlLine:
    line = ControlLine(
        second.address,
        role=PREVIOUS,
        terms=SECOND,
        secret=SECRET,
        deliver=lambda data, why: True,
        limits=LIMITS,
        data_address=data_address,
    )
    ends.callback(line.close)
    return line


def test_the_previous_stage_reports_its_data_address(ends: ExitStack) -> None:
    second = listen(ends, SECOND)
    assert second.data_address_of_previous() == ""
    line = previous(ends, second, "10.0.0.9:1234")
    assert line.wait_joined(SOON)
    assert line.about == ABOUT
    assert second.data_address_of_previous() == "10.0.0.9:1234"
    line.close()
    eventually(lambda: second.data_address_of_previous() == "")
    assert previous(ends, second, "10.0.0.9:5678").wait_joined(SOON)
    assert second.data_address_of_previous() == "10.0.0.9:5678"


def test_an_engine_master_has_no_data() -> None:
    sent = dict(handshake.metadata(MASTER, FIRST, SECRET, "10.0.0.9:1"))
    assert handshake.data_address_of(sent) == ""


@pytest.mark.parametrize("address", ["x" * 1001, "a\nb", "ü" * 501])
def test_a_data_address_that_cannot_be_is_refused(ends: ExitStack, address: str) -> None:
    second = listen(ends, SECOND)
    with pytest.raises(WorkerRefused, match="data address is unreadable"):
        previous(ends, second, address).wait_joined(SOON)
    assert second.data_address_of_previous() == ""
    assert handshake.data_address_of({"orca-join-bin": b"J\x01\xff"}) is None, "it is not UTF-8"


# Where a worker listens, and from when


def test_a_port_accepts_no_connection_before_it_is_open(ends: ExitStack) -> None:
    worker = listen(ends, about=None)
    quick = replace(LIMITS, join_seconds=0.2)
    with pytest.raises(WorkerUnreachable, match="did not"):
        join(ends, worker, seconds=0.5, limits=quick)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, ends, worker, limits=quick)
        with pytest.raises(TimeoutError):
            joining.result(0.5)
        worker.open(ABOUT)
        assert works(joining.result(SOON), worker)


def test_a_port_has_its_address_before_it_is_open(ends: ExitStack) -> None:
    worker = listen(ends, about=None)
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(ends, address=worker.address)
    worker.close()
    listen(ends, address=worker.address)


@pytest.fixture
def path() -> Iterator[str]:
    with TemporaryDirectory(prefix="orca") as short:  # a socket's path has 107 characters at most
        yield f"{short}/w"


def test_a_unix_socket_is_a_line_as_others_are_and_needs_no_secret(ends: ExitStack, path: str) -> None:
    worker = listen(ends, secret="", address=f"unix:{path}")
    assert worker.address == f"unix:{path}"
    channel = join(ends, worker, secret="")
    assert works(channel, worker)
    worker.close()
    assert not Path(path).exists()
    again = listen(ends, secret="", address=f"unix:{path}")
    eventually(lambda: rejoined(channel, again))


@pytest.mark.parametrize("opened", [True, False])
def test_a_socket_that_a_killed_process_left_is_taken_over(ends: ExitStack, path: str, opened: bool) -> None:
    program = (
        "import sys\n"
        "from tests.host.engine.test_grpc_channel import *\n"
        "port = ControlPort(sys.argv[1], terms=FIRST, secret=SECRET, deliver=lambda data: True)\n"
        "if sys.argv[2:]: port.open(ABOUT)\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", program, f"unix:{path}", *(["open"] if opened else [])]
    root = ROOT
    with Popen(arguments, stdin=PIPE, stdout=PIPE, cwd=root) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        with pytest.raises(ConfigError, match="another process listens there"):
            listen(ends, address=f"unix:{path}")
        process.kill()
        process.wait(SOON)
    assert Path(path).is_socket()
    worker = listen(ends, address=f"unix:{path}")
    assert works(join(ends, worker), worker)


def test_a_file_that_is_not_a_socket_is_not_removed(ends: ExitStack, path: str) -> None:
    Path(path).write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        listen(ends, address=f"unix:{path}")
    assert Path(path).read_text() == "mine"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_has_brackets(ends: ExitStack) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    worker = listen(ends, secret="", address="[::1]:0")
    assert worker.address.startswith("[::1]:") and worker.address != "[::1]:0"
    assert works(join(ends, worker, secret=""), worker)


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", ":80", "::1:80", "[::1]", "[::1]:", "[worker]:80", "a:b", "a:65536", "a:-1"),
        *("a:\u0661", "a:123456", "a b:80", "a\n:80", "http://a:80", "ipv4:a:80", "a,b:80"),
        *("unix:", "unix:relative", "unix:/a?b", "unix:/a b", "unix:/a%20b", "unix:80"),
    ],
)
def test_an_address_that_cannot_be_read(ends: ExitStack, address: str) -> None:
    message = "it must be host:port, .* or unix:/absolute/path"
    with pytest.raises(ConfigError, match=message):
        listen(ends, address=address)
    with pytest.raises(ConfigError, match=message):
        ControlChannel(lambda: [address], [FIRST], secret=SECRET, seconds=0.0)


# Why a worker will never be there


def test_a_failure_ends_the_wait_and_closes_the_joined_lines(ends: ExitStack) -> None:
    first, absent = listen(ends), listen(ends, SECOND, about=None)
    n_looks = 0

    def failure() -> EngineError | None:
        nonlocal n_looks
        n_looks += 1
        return EngineError("stage 2 cannot start") if n_looks == 3 else None

    began = time.monotonic()
    with pytest.raises(EngineError, match="stage 2 cannot start"):
        ControlChannel(
            lambda: [first.address, absent.address],
            [FIRST, SECOND],
            secret=SECRET,
            seconds=600.0,
            limits=LIMITS,
            failure=failure,
        )
    assert time.monotonic() - began < SOON
    assert works(join(ends, first), first)


def test_a_second_master_is_refused_until_the_first_has_left(ends: ExitStack) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    with pytest.raises(WorkerRefused, match="an engine master has already joined this worker"):
        join(ends, worker, seconds=2.0)  # the first one might leave meanwhile
    assert works(channel, worker)
    channel.close()
    assert works(join(ends, worker), worker)


def test_the_first_stage_has_none_before_it(ends: ExitStack) -> None:
    line = ControlLine(
        listen(ends).address,
        role=PREVIOUS,
        terms=FIRST,
        secret=SECRET,
        deliver=lambda data, why: True,
        limits=LIMITS,
    )
    ends.callback(line.close)
    with pytest.raises(WorkerRefused, match="this worker accepts master, but the caller is 'previous'"):
        line.wait_joined(SOON)


def test_a_refusal_is_reported_at_once_even_if_other_workers_are_missing(ends: ExitStack) -> None:
    other = listen(ends, replace(SECOND, dtype="bfloat16"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        closed_port = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorkerRefused, match=r"stage 2 at .* refused the connection: dtype"):
            ControlChannel(
                lambda: [closed_port, other.address],
                [FIRST, SECOND],
                secret=SECRET,
                seconds=10 * SOON,
                limits=LIMITS,
            )


def test_a_wait_reports_which_worker_it_waits_for(ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_channel, "_FIRST_NOTICE_SECONDS", 0.0)
    first, reported = listen(ends), list[str]()

    def enough() -> EngineError | None:
        return EngineError("enough") if reported else None

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed_port = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match="enough"):
            ControlChannel(
                lambda: [first.address, closed_port],
                [FIRST, SECOND],
                secret=SECRET,
                seconds=SOON,
                limits=LIMITS,
                failure=enough,
                on_wait=reported.append,
            )
    (line,) = reported
    assert "the worker of stage 2 at" in line and closed_port in line


def test_connecting_to_a_closed_port(ends: ExitStack) -> None:
    first = listen(ends)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(WorkerUnreachable, match=rf"stage 2 at 127.0.0.1:{port} was not reached"):
            ControlChannel(
                lambda: [first.address, f"127.0.0.1:{port}"],
                [FIRST, SECOND],
                secret=SECRET,
                seconds=1.5,
                limits=LIMITS,
            )
        assert time.monotonic() - began < SOON
    assert works(join(ends, first), first)  # what was joined was left


def test_a_server_that_never_answers(ends: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WorkerUnreachable, match="did not"):
            ControlChannel(
                lambda: [f"127.0.0.1:{port}"],
                [FIRST],
                secret=SECRET,
                seconds=1.0,
                limits=replace(LIMITS, join_seconds=0.3),
            )


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\xff\x16\x03" * 9999])
def test_garbage_on_the_port_does_not_affect_other_connections(ends: ExitStack, garbage: bytes) -> None:
    worker = listen(ends)
    channel = join(ends, worker)
    with socket.create_connection(("127.0.0.1", worker.port), timeout=SOON) as stranger:
        try:
            stranger.sendall(garbage)
            while stranger.recv(1 << 16):
                pass
        except ConnectionError:
            pass
    assert works(channel, worker)


class Relay:
    """Relays bytes between its port and another, until it is told to stop.

    To either end the peer then seems to have vanished silently: the connection stays open.
    """

    def __init__(self, ends: ExitStack, port: int) -> None:
        self.silent = threading.Event()
        self._over = threading.Event()
        self._to = port
        self._ends = ends
        self._listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(0.02)
        ends.callback(self._over.set)
        threading.Thread(target=self._accept).start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near = self._listener.accept()[0]
            except OSError:
                continue
            far = socket.create_connection(("127.0.0.1", self._to), timeout=SOON)
            for source, sink in ((near, far), (far, near)):
                source.settimeout(0.02)
                threading.Thread(target=self._pass, args=(source, sink)).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while not self._over.is_set():
            try:
                data = source.recv(1 << 16)
                if not self.silent.is_set():
                    sink.sendall(data)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data and not self.silent.is_set():
                break
            time.sleep(0.0 if data else 0.02)
        source.close()


def test_a_peer_that_vanished_without_a_word_is_noticed_on_both_sides(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = tuple((name, value // 10 if name.endswith("_ms") else value) for name, value in OPTIONS)
    monkeypatch.setattr(line, "OPTIONS", quick)
    monkeypatch.setattr(port, "OPTIONS", quick)
    worker = listen(ends)
    relay = Relay(ends, worker.port)
    channel = ControlChannel(lambda: [f"127.0.0.1:{relay.port}"], [FIRST], secret=SECRET, limits=LIMITS)
    ends.callback(channel.close)
    assert works(channel, worker)
    assert channel.receive(2.0) is None  # an idle line stays
    began = time.monotonic()
    relay.silent.set()
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.data is None
    assert time.monotonic() - began < SOON / 2  # of gRPC's own it would be a minute
    assert works(join(ends, worker), worker)  # for the worker, the master before has left


def test_a_worker_that_takes_no_frames_breaks_the_line(ends: ExitStack) -> None:
    worker = listen(ends, frames=4)
    channel = join(ends, worker)
    for _ in range(5):
        channel.send(0, b"too many")
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.data is None
    assert arrival.why == "this worker's queue of received frames is full"
    assert [worker.receive(SOON) for _ in range(4)] == [b"too many"] * 4
    eventually(lambda: rejoined(channel, worker))


def test_a_master_that_takes_no_frames_breaks_the_line(ends: ExitStack) -> None:
    worker = listen(ends)
    channel = join(ends, worker, limits=replace(LIMITS, frames=4))
    for _ in range(5):
        worker.report(b"too many")
    eventually(lambda: len(channel._inbox) == 5)  # the last says that the line broke
    eventually(lambda: rejoined(channel, worker))
    for _ in range(4):
        assert channel.receive(SOON) == Arrival(0, b"too many")
    assert channel.receive(SOON) == Arrival(0, None, "the queue of received frames is full")


def test_a_send_beyond_the_queue_breaks_the_line_and_does_not_wait(ends: ExitStack) -> None:
    worker = listen(ends)
    channel = join(ends, worker, limits=replace(LIMITS, frames=1))
    large = bytes(16 << 20)
    for _ in range(50):  # far more than one queue and gRPC's windows hold
        channel.send(0, large)
    arrival = channel.receive(SOON)
    assert arrival is not None and arrival.data is None
    assert arrival.why == "1 frames wait to be sent, but the worker reads none"


def test_closing_does_not_wait_for_a_lost_worker() -> None:
    before = set(threading.enumerate())
    worker = ControlPort("127.0.0.1:0", terms=FIRST, secret=SECRET, deliver=lambda data: True)
    worker.open(ABOUT)
    channel = ControlChannel(lambda: [worker.address], [FIRST], secret=SECRET, limits=LIMITS)
    worker.close()
    began = time.monotonic()
    channel.close()
    channel.close()
    worker.close()
    assert time.monotonic() - began < LIMITS.close_seconds
    assert channel.receive(SOON) is None  # at once
    eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.is_alive()])


def test_frames_after_the_join_arrive_unchanged(ends: ExitStack) -> None:
    """The line does not check them: the controller does, and ends the epoch if one is not a frame."""
    worker = listen(ends)
    garbage = b"\xff\xff no message"
    with grpc.insecure_channel(worker.address) as stranger:
        method = stranger.stream_stream(handshake.METHOD)
        sent = handshake.metadata(MASTER, FIRST, SECRET)
        call = method(iter([garbage]), metadata=sent, timeout=SOON)
        assert list(call) == [JOINED]
    assert worker.receive(SOON) == garbage
    with pytest.raises(BadFrame, match="not a frame"):
        decode_frame(garbage)
    assert works(join(ends, worker), worker)


def test_a_port_that_is_taken(ends: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(ends, address=f"127.0.0.1:{port}")


def test_what_others_can_reach_needs_a_secret(ends: ExitStack) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "10.0.0.7:0", "somewhere:0"):
        with pytest.raises(ConfigError, match="it has no secret"):
            listen(ends, secret="", address=address)
    with pytest.raises(ConfigError, match="more than 1024 bytes"):
        listen(ends, secret="x" * 1025)


# A worker that comes back elsewhere


def test_the_line_to_a_worker_that_moved_joins_it_there(ends: ExitStack) -> None:
    first, before, after = listen(ends), listen(ends, SECOND), listen(ends, SECOND)
    addresses = [first.address, before.address]
    channel = ControlChannel(lambda: addresses, [FIRST, SECOND], secret=SECRET, seconds=SOON, limits=LIMITS)
    ends.callback(channel.close)
    assert channel.follow() == (first.address, before.address)
    assert works(channel, first) and works(channel, before, 1)
    addresses[1] = after.address
    assert works(channel, before, 1), "until it is followed"
    assert channel.follow() == (first.address, after.address)

    def arrived() -> bool:
        channel.send(1, b"where are you")
        return after.receive(0.02) is not None

    eventually(arrived)
    while after.receive(0.05) is not None:
        pass
    assert channel.receive(0.0) is None, "the line was closed, it did not break"
    assert works(channel, first) and works(channel, after, 1)
    moved = replace(LIMITS, first_delay=0.01)
    again = join(ends, before, terms=(SECOND,), limits=moved)  # it was left, so another may have it
    assert works(again, before)


def test_a_worker_may_move_while_it_is_waited_for(ends: ExitStack) -> None:
    worker, absent = listen(ends), listen(ends, about=None)
    addresses = iter([absent.address] * 3)
    began = time.monotonic()
    channel = ControlChannel(
        lambda: [next(addresses, worker.address)], [FIRST], secret=SECRET, seconds=10 * SOON, limits=LIMITS
    )
    ends.callback(channel.close)
    assert time.monotonic() - began < SOON
    assert works(channel, worker)
    assert [about.device for about in channel.about] == [ABOUT.device]


def test_each_stage_needs_its_own_address() -> None:
    with pytest.raises(ConfigError, match="give each stage one address of its own"):
        ControlChannel(lambda: ["a:1", "a:1"], [FIRST, SECOND], secret=SECRET)
    with pytest.raises(ConfigError, match="there are 1 worker addresses, a:1, for 2 stages"):
        ControlChannel(lambda: ["a:1"], [FIRST, SECOND], secret=SECRET)


def test_a_queue_is_bounded_in_bytes_as_well() -> None:
    queue = FrameQueue[bytes](10, limit_bytes=100, weigh=len)
    assert queue.put(bytes(500)), "one that is larger passes alone"
    assert not queue.put(b"x")
    assert queue.put(b"x", beyond_limit=True)
    assert (queue.get(SOON), queue.get(SOON)) == (bytes(500), b"x")
    assert queue.put(bytes(60)) and queue.put(bytes(40)) and not queue.put(b"x")
    assert queue.get(SOON) == bytes(60)
    assert queue.put(b"x")
