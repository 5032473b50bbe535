"""Three tenants of one server: each sees exactly what it would see alone, whatever the others do and try."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from orca_jax.config import SchedulingConfig
from server.rpc.generation_pb2_grpc import GenerationStub
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from tests.endpoint.harness import CONFIG, Server, serving, until
from tests.endpoint.tenants.party import ANOTHERS, CHOSEN_IDS, OPERATIONS, HeldEngine, Party, joined, outcome

NAMES = ("first", "second", "third")
KEYS = tuple(f"{name}-tenant-key" for name in NAMES)
# Cached blocks of one tenant are not to make room for another's: that is no secret, but it shows in counts.
ROOMY = replace(CONFIG, n_slots=1 << 19, scheduling=SchedulingConfig())


@dataclass(frozen=True)
class Step:
    """One step: an operation of a tenant, or several calls while the engine is held."""

    who: str
    seed: int
    act: Callable[[Party, Random], None] | None  # None while the engine is held


def steps_of(seed: int, n: int) -> list[Step]:
    """Random steps, in which all operations are about equally frequent, after one that makes things."""
    draw = Random(seed)
    first = [Step(name, draw.randrange(1 << 30), Party.begin_with) for name in NAMES]
    acts: list[Any] = [*OPERATIONS, None, None] * (n // len(OPERATIONS) + 1)
    draw.shuffle(acts)
    return first + [Step(draw.choice(NAMES), draw.randrange(1 << 30), act) for act in acts[:n]]


@contextmanager
def parties(
    folder: Path, names: Sequence[str], tried: dict[str, list[str]] | None = None
) -> Iterator[tuple[Server, HeldEngine, dict[str, Party]]]:
    """A server with three keys, and those tenants who use it, on one connection over gRPC."""
    engine = HeldEngine()
    options = EndpointOptions(port=0, grpc_port=0, access_log="off", batch_dir=folder)
    with (
        serving(engine=engine, config=ROOMY, options=options, keys=ApiKeys(KEYS)) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
        ExitStack() as stack,
    ):
        stub = GenerationStub(channel)
        found = {
            name: Party(name, KEYS[NAMES.index(name)], server, stub, (tried or {}).get(name, ()))
            for name in names
        }
        for party in found.values():
            stack.enter_context(party.http)
            party.others = [other for other in found.values() if other is not party]
        yield server, engine, found


def hold(
    step: Step, server: Server, engine: HeldEngine, found: dict[str, Party], threads: ThreadPoolExecutor
) -> None:
    """Calls of all tenants at once: equal ids, streams, a batch, and attempts to end whatever is live."""
    draw = Random(step.seed)
    with_batch = draw.random() < 0.3
    starts = {name: [(draw.choice(CHOSEN_IDS), draw.random() < 0.3) for _ in range(3)] for name in NAMES}
    ends = {name: draw.choice(("all", "one", "none")) for name in NAMES}
    begun: list[tuple[Party, str, Any]] = []
    ended: set[str] = set()
    engine.gate.clear()
    try:
        if with_batch:
            if party := found.get(step.who):
                upload = party.upload_lines(draw, 3, wrong=0)
                batch_id = party.begin_batch(upload)
                until(lambda: server.gateway.n_live > 0, "a line of the batch")
                begun.append((party, "batch", batch_id))
            starts = {name: [] for name in NAMES}
            ends = {name: "none" if name == step.who else "all" for name in NAMES}
        for i in range(3):  # in turns
            for name, party in found.items():
                for request_id, is_http in starts[name][i : i + 1]:
                    if is_http:
                        begun.append((party, "stream", party.begin_stream(threads)))
                    else:
                        begun.append((party, "call", party.begin(party.named(request_id, "held"))))
        live = [request.request_id for request in server.service.pool.live()]
        names = sorted(
            {part for one in live for part in (one, one.partition(" #")[0], one.rpartition("-")[0])}
        )
        for name, party in found.items():
            for one in {"all": names, "one": CHOSEN_IDS[:1], "none": ()}[ends[name]]:
                if party.found(one):
                    ended.add(f"{name} {one}")
            party.note("ended", sum(one.startswith(name) for one in ended))
    finally:
        engine.gate.set()
    for party, kind, one in begun:
        if kind == "batch":
            party.end_of_batch(one)
        elif kind == "call":
            party.note("held call", outcome(one))
        else:
            seen = joined(one.result().text)
            if seen["errors"]:  # how much it had when it was ended depends on who came first
                seen = seen["errors"]
            party.note("held stream", seen)
    until(lambda: server.gateway.n_live == 0, "the end of all calls")


def run(
    folder: Path, steps: Sequence[Step], names: Sequence[str], tried: dict[str, list[str]] | None = None
) -> dict[str, Party]:
    """Select the steps of the named tenants."""
    with parties(folder, names, tried) as (server, engine, found), ThreadPoolExecutor(9) as threads:
        for step in steps:
            if step.act is None:
                hold(step, server, engine, found, threads)
            elif party := found.get(step.who):
                step.act(party, Random(step.seed))
    return found


def compare(folder: Path, seed: int, n: int) -> tuple[dict[str, Party], Counter[tuple[str, int | str]]]:
    steps = steps_of(seed, n)
    together = run(folder / "together", steps, NAMES)
    seen = Counter[tuple[str, int | str]]()
    for name, party in together.items():
        alone = run(folder / name, steps, [name], {name: party.tried})[name]
        for i, (one, other) in enumerate(zip_longest(party.view, alone.view)):
            assert one == other, f"{name} sees something else alone, seed {seed}, its answer {i}"
        assert party.tried == alone.tried
        for what, answer in party.view:
            status = (
                answer[0] if isinstance(answer, list) and isinstance(answer[0], int | str) else str(answer)
            )
            seen[what, status] += 1
            if status == 200:
                assert ANOTHERS not in str(answer), (what, answer)
    return together, seen


def check_use(together: dict[str, Party], seen: Counter[tuple[str, int | str]]) -> None:
    """Check that the operations covered every kind of resource and outcome."""
    for name in ("completion", "chat", "message", "response new", "upload", "files", "batches", "tokenize"):
        assert seen[name, 200] > 0, name
    for name in ("response ", "stored response ", "file ", "batch", "new batch"):
        statuses = {status for what, status in seen if what.startswith(name)}
        assert {200, 404} <= statuses, (name, statuses)
    assert seen["generate", "OK"] > 0 and seen["held call", "CANCELLED"] > 0 and seen["held call", "OK"] > 0
    assert seen["held call", "ALREADY_EXISTS"] > 0
    assert all(len(party.tried) > 0 for party in together.values())
    for party in together.values():
        assert re.search(r"'cached_tokens': [1-9]", str(party.view)), "no prompt was in the cache"


def test_each_tenant_sees_what_it_sees_alone(tmp_path: Path) -> None:
    check_use(*compare(tmp_path, seed=43, n=150))


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_operations_of_three_tenants(tmp_path: Path) -> None:
    together, seen = compare(tmp_path, seed=44, n=10_000)
    check_use(together, seen)
    print({name: (len(party.view), len(party.tried)) for name, party in together.items()}, dict(seen))
