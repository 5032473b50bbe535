"""Prompts that one engine computes and another continues, over loopback: the same tokens as of one engine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.launch.travelling_blocks import fingerprint
from orca_jax.model_files.found_model import find_model
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.arriving_blocks import ArrivingBlocks
from orca_jax.scheduling.leases import Leases
from orca_jax.service.generation import Generation
from tests.device.model.golden import load_golden
from tests.endpoint.harness import until

GOLDEN = load_golden("llama-grouped")
ROWS = [row for row, prompt in enumerate(GOLDEN.prompts) if 40 < len(prompt) < 80]
SIZES: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 64, "n_slots": 192, "block_size": 4}
SIZES |= {"kv_host_bytes": 1 << 20, "compile_ahead": False}
FOR_ANOTHER = KVTransferParams(do_remote_decode=True)
EARLY = KVTransferParams(do_remote_decode=True, offer_early=True)
N_OUTPUT = 8


def engine(role: str, **other: Any) -> LLM:
    return LLM(GOLDEN.directory, role=role, **{**SIZES, **other})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def prefill() -> Iterator[LLM]:
    with engine("prefill") as llm:
        yield llm


@pytest.fixture(scope="module")
def decode() -> Iterator[LLM]:
    with engine("decode", kv_transfer_seconds=60.0) as llm:
        yield llm


def lease(llm: LLM, row: int, salt: str) -> KVTransferParams:
    """Let an engine compute a prompt for another one."""
    params = SamplingParams(max_tokens=1, temperature=0)
    scheduling = SchedulingParams(kv_transfer=FOR_ANOTHER, cache_salt=salt)
    with llm.service.submit(GOLDEN.prompts[row], params, scheduling=scheduling) as generation:
        generation.result(30)
    assert generation.kv_lease is not None
    return generation.kv_lease


def n_cached_of(llm: LLM, row: int, transfer: KVTransferParams, salt: str) -> int:
    """The tokens of a prompt that an engine found, after it has given the right output."""
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
    scheduling = SchedulingParams(kv_transfer=transfer, cache_salt=salt)
    with llm.service.submit(GOLDEN.prompts[row], params, scheduling=scheduling) as generation:
        result = generation.result(30)
    sure = GOLDEN.sure(row)[:N_OUTPUT]
    assert len(result.token_ids) == N_OUTPUT and tuple(result.token_ids[: len(sure)]) == sure
    return result.n_cached


def most_cached(row: int) -> int:
    """All full blocks, since the next token is known too."""
    return len(GOLDEN.prompts[row]) // 4 * 4


def arriving(llm: LLM) -> ArrivingBlocks:
    found = llm.service.scheduler.kv.arriving
    assert isinstance(found, ArrivingBlocks)
    return found


def leases(llm: LLM) -> Leases:
    found = llm.service.scheduler.kv.leases
    assert isinstance(found, Leases)
    return found


def at_rest(llm: LLM) -> None:
    """Check that an engine without requests holds every place of its host tier again."""
    host = llm.service.scheduler.kv.host
    assert host is not None
    until(lambda: len(host) + host.n_free == host.n and not arriving(llm).n_under_way, "rest")


def test_prompts_arrive_and_go_on_with_the_same_tokens(prefill: LLM, decode: LLM) -> None:
    for row in ROWS[:3]:
        assert n_cached_of(decode, row, lease(prefill, row, "all"), "all") == most_cached(row)
    assert arriving(decode).n_blocks >= 30
    until(lambda: not len(leases(prefill)) and not leases(prefill).n_bytes, "the end of all leases")
    at_rest(decode)


@pytest.mark.parametrize("split", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_servers_may_be_split_differently(prefill: LLM, decode: LLM, split: dict[str, int]) -> None:
    """A block travels whole: heads of all devices, layers of all stages."""
    row, salt = ROWS[0], str(split)
    with engine("decode", kv_transfer_seconds=60.0, **split) as other:
        assert n_cached_of(other, row, lease(prefill, row, salt), salt) == most_cached(row)
        at_rest(other)
    with engine("prefill", **split) as other:
        assert n_cached_of(decode, row, lease(other, row, salt), salt) == most_cached(row)
    at_rest(decode)


def test_the_first_token_comes_from_the_server_that_computed_the_prompt(prefill: LLM, decode: LLM) -> None:
    """The transfer hangs here. The sampled tokens are those of one engine."""
    sampled: dict[str, Any] = {"max_tokens": N_OUTPUT, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    prompt = GOLDEN.prompts[ROWS[0]]
    with LLM(GOLDEN.directory, max_batch_size=4, n_slots=192, compile_ahead=False) as alone:
        (expected,) = alone.generate([list(prompt)], SamplingParams(**sampled))
    host, real_port = leases(prefill).address
    with relay(real_port, 5, hang=True) as port:
        leases(prefill).address = (host, port)
        try:
            params = SamplingParams(**dict(sampled, max_tokens=1))
            scheduling = SchedulingParams(kv_transfer=FOR_ANOTHER)
            with prefill.service.submit(prompt, params, scheduling=scheduling) as generation:
                generation.result(30)
        finally:
            leases(prefill).address = (host, real_port)
        assert generation.kv_lease is not None
        scheduling = SchedulingParams(kv_transfer=generation.kv_lease)
        arriving(decode).seconds = 3.0
        try:
            params = SamplingParams(**sampled)
            with decode.service.submit(prompt, params, scheduling=scheduling) as generation:
                piece = generation.next_piece(30)
                assert piece is not None and piece.token_ids == tuple(expected.token_ids[:1])
                assert generation.result(30).token_ids == expected.token_ids
        finally:
            arriving(decode).seconds = 60.0
    at_rest(decode)


class Chunks:
    """An engine of the role prefill with 16 tokens an iteration; it waits before a prompt's third chunk."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.goes_on = threading.Event()
        self._issue, self._n_issued = llm.service.scheduler.engine.issue, 0
        llm.service.scheduler.engine.issue = self.issue

    def issue(self, rows: Any) -> Any:
        self._n_issued += 1
        assert self._n_issued < 3 or self.goes_on.wait(30)
        return self._issue(rows)

    @contextmanager
    def offered(self, row: int, salt: str) -> Iterator[Generation]:
        """A prompt's request, whose blocks others may fetch."""
        params = SamplingParams(max_tokens=1, temperature=0)
        scheduling = SchedulingParams(kv_transfer=EARLY, cache_salt=salt)
        with self.llm.service.submit(GOLDEN.prompts[row], params, scheduling=scheduling) as generation:
            until(lambda: generation.kv_lease is not None, "the offer")
            yield generation


@pytest.fixture
def chunks() -> Iterator[Chunks]:
    with engine("prefill", max_batch_tokens=16) as llm:
        chunks = Chunks(llm)
        try:
            yield chunks
        finally:
            chunks.goes_on.set()


def n_arrived(llm: LLM) -> int:
    """The blocks of transfers under way that have arrived."""
    return sum(fetch.n_arrived for fetch in [*arriving(llm)._fetches.values()])


def test_blocks_arrive_while_later_chunks_are_computed(chunks: Chunks, decode: LLM) -> None:
    """The third chunk is issued once the blocks of the first two are with the other engine."""
    row = ROWS[0]
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
    n_asked = arriving(decode).n_asked
    with chunks.offered(row, "grows") as offer:
        scheduling = SchedulingParams(kv_transfer=offer.kv_lease, cache_salt="grows")
        with decode.service.submit(GOLDEN.prompts[row], params, scheduling=scheduling) as generation:
            until(lambda: n_arrived(decode) == 8, "two chunks")
            assert offer.finish_reason is None and generation.poll() is None
            chunks.goes_on.set()
            piece = generation.next_piece(30)
            assert piece is not None and piece.token_ids[:1] == tuple(offer.result(30).token_ids)
            result = generation.result(30)
    sure = GOLDEN.sure(row)[:N_OUTPUT]
    assert tuple(result.token_ids[: len(sure)]) == sure and result.n_cached == most_cached(row)
    assert arriving(decode).n_asked == n_asked + 1
    until(lambda: not len(leases(chunks.llm)) and not leases(chunks.llm).n_bytes, "the end of all leases")
    at_rest(decode)


@pytest.mark.parametrize("cause", ["cancelled", "broken"])
def test_blocks_that_came_before_the_end_are_kept_and_the_others_computed(
    chunks: Chunks, decode: LLM, cause: str
) -> None:
    row = ROWS[0]
    counts: list[int] = []
    with chunks.offered(row, cause) as offer:
        assert offer.kv_lease is not None
        args = (decode, row, offer.kv_lease, cause)
        thread = threading.Thread(target=lambda: counts.append(n_cached_of(*args)))
        thread.start()
        until(lambda: n_arrived(decode) == 8, "two chunks")
        if cause == "cancelled":
            offer.end(FinishReason.CANCELLED)
        else:
            granted = chunks.llm.service.scheduler.kv.leases
            assert granted is not None
            granted.stop()
        chunks.goes_on.set()
        thread.join(30)
    # The third chunk's may come too before the scheduler has seen the end.
    assert counts == [8 * 4] or (counts == [12 * 4] and cause == "cancelled")
    until(lambda: not len(leases(chunks.llm)) and not leases(chunks.llm).n_bytes, "the end of all leases")
    at_rest(decode)


def test_requests_that_wait_for_their_prompts_run_together(prefill: LLM, decode: LLM) -> None:
    """Eight at once: they take turns where the host tier has no room for all."""
    found = [(row, lease(prefill, row, "many")) for row in ROWS[:8]]
    counts: dict[int, int] = {}

    def run(row: int, params: KVTransferParams) -> None:
        counts[row] = n_cached_of(decode, row, params, "many")

    threads = [threading.Thread(target=run, args=each) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == {row: most_cached(row) for row, _ in found}
    at_rest(decode)


def test_a_lease_is_for_its_owner_once(prefill: LLM, decode: LLM) -> None:
    row = ROWS[0]
    params = lease(prefill, row, "owner")
    assert n_cached_of(decode, row, params, "a stranger") == 0
    assert n_cached_of(decode, ROWS[1], params, "owner") == 0, "another prompt"
    assert n_cached_of(decode, row, params, "owner") == most_cached(row), "which left the lease as it was"
    until(lambda: not len(leases(prefill)), "the end of the lease")
    forged = replace(lease(prefill, row, "forged"), remote_host="localhost")
    n_asked = arriving(decode).n_asked
    assert n_cached_of(decode, row, forged, "forged") == 0 and arriving(decode).n_asked == n_asked
    at_rest(decode)


@contextmanager
def relay(to: int, n_bytes: int, *, hang: bool) -> Iterator[int]:
    """The port of a relay that passes on so many bytes of each answer, and then closes or says nothing."""
    done = threading.Event()

    def pass_on(one: socket.socket, other: socket.socket, limit: int | None) -> None:
        try:
            while data := one.recv(1 << 16 if limit is None else min(limit, 1 << 16)):
                other.sendall(data)
                if limit is not None:
                    limit -= len(data)
                    if not limit:
                        break
            if limit == 0 and hang:
                done.wait(30)
        except OSError:
            pass
        for each in (one, other):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, socket.create_connection(("127.0.0.1", to)) as onwards:
            back = threading.Thread(target=pass_on, args=(connection, onwards, None))
            back.start()
            pass_on(onwards, connection, n_bytes)
            back.join(30)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join(30)


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("n_bytes", [5, 60, 1000])
def test_a_transfer_that_breaks_or_hangs_is_computed(
    prefill: LLM, decode: LLM, n_bytes: int, hang: bool
) -> None:
    """In the greeting, in the answer's frame, and among the blocks."""
    row, salt = ROWS[0], f"{n_bytes} {hang}"
    host, real_port = leases(prefill).address
    with relay(real_port, n_bytes, hang=hang) as port:
        leases(prefill).address = (host, port)
        try:
            params = lease(prefill, row, salt)
        finally:
            leases(prefill).address = (host, real_port)
        arriving(decode).seconds = 0.2 if hang else 60.0
        try:
            assert n_cached_of(decode, row, params, salt) == 0
        finally:
            arriving(decode).seconds = 60.0
    at_rest(decode)


def test_a_server_that_is_gone_and_a_lease_that_is_over(prefill: LLM, decode: LLM) -> None:
    row = ROWS[0]
    params = lease(prefill, row, "over")
    leases(prefill).end_all()
    assert n_cached_of(decode, row, params, "over") == 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    gone = TransferFacts("", "").new_lease(engine_id="", host="127.0.0.1", port=port, n_blocks=3)
    assert n_cached_of(decode, row, gone, "gone") == 0
    assert not leases(prefill).n_bytes
    at_rest(decode)


def test_a_fingerprint_tells_apart_all_that_changes_the_bytes(tmp_path: Path) -> None:
    def key(
        directory: Path = GOLDEN.directory, dtype: str = "float32", kinds: tuple[str, ...] = (), **other: Any
    ) -> str:
        config = EngineConfig(directory, **other)
        return fingerprint(find_model(directory, config.load_format), config, dtype, kinds)

    for path in GOLDEN.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert key(tmp_path) == key(), "a copy, on another machine"
    keys = [
        key(),
        key(dtype="bfloat16"),
        key(kinds=("a",)),
        key(block_size=8),
        key(quantization="int8"),
        key(load_format="dummy"),
        key(load_format="dummy", seed=1),
    ]
    weights = next(tmp_path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    keys.append(key(tmp_path))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"kv_host_bytes": 0}, "role 'decode' moves keys .*, and kv_host_bytes is 0; set it"),
        ({"worker_processes": True}, "role 'decode' does not work with workers or worker_processes yet"),
        ({"record": "r"}, "role 'decode' does not work with record yet"),
        (
            {"kv_transfer_address": "127.0.0.1:7"},
            "role 'decode' gives nothing to other servers; leave it out",
        ),
        ({"kv_transfer_address": "0.0.0.0:7"}, "kv_transfer_address is '0.0.0.0:7'; it must be host:port"),
    ],
)
def test_what_it_does_not_work_with_is_refused(other: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**{"role": "decode", "kv_host_bytes": 1 << 20, **other})


def test_an_address_for_other_machines_needs_the_secret() -> None:
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.1:0', which other machines can reach"):
        engine("prefill", kv_transfer_address="10.0.0.1:0")
