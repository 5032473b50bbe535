"""Three groups of the LeaderWorkerSet as processes; one loses a worker, and the others never notice."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from bench.server.repeated_streams import KnownStream, RepeatedStreams, asked
from bench.server.worker_faults import figures, known_streams
from tests.scaleout.loopback_pods import Group, LoopbackPods, liveness
from tests.scaleout.manifests import leader_worker_set
from tests.whole.workers.worker_harness import write_model

N_GROUPS = 3
N_STREAMS = 3  # in each group
N_OUTPUT = 24
STRUCK = 1  # the group that loses a worker
SOON = 480.0  # far more than it takes where nothing else runs
_LOOK_SECONDS = 0.1
SERVE_FLAGS = (
    "--max-batch-size",
    "4",
    "--max-batch-tokens",
    "8",
    "--n-slots",
    "400",
    "--dtype",
    "float32",
    "--access-log",
    "off",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def known(model: Path) -> list[KnownStream]:
    return known_streams(model, n=N_STREAMS, n_output=N_OUTPUT, longest=8)


@pytest.fixture
def pods(model: Path, tmp_path: Path) -> Iterator[LoopbackPods]:
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "pods").mkdir()
    mounts = {"/models/checkpoint": model, "/etc/orca/control": tmp_path}
    flags = {"serve": SERVE_FLAGS}
    with LoopbackPods(leader_worker_set(), N_GROUPS, tmp_path / "pods", mounts=mounts, flags=flags) as pods:
        yield pods


async def ready(group: Group) -> None:
    """Wait for the leader's readiness probe, without which no container may end."""
    while True:
        assert group.alive(), f"a container of group {group.index} has ended"
        try:
            status, _ = await asked(group.http_address, "/ready")
        except OSError:
            status = 0
        if status == 200:
            return
        await asyncio.sleep(_LOOK_SECONDS)


async def start(pods: LoopbackPods) -> None:
    """Start groups: the first compiles its programs, the others start from an image that has them."""
    first, *others = pods.groups
    await ready(first.start())
    for i in range(len(first.workers)):
        shutil.copytree(pods.cache(first.index, i), pods.programs, dirs_exist_ok=True)
    for group in others:
        group.start()
    for group in others:
        await ready(group)


async def lose_a_worker(pods: LoopbackPods, known: list[KnownStream]) -> dict[str, float]:
    """Kill the last stage's worker of one group under load, and restart its container.

    Returns the longest silences afterwards: of the group's streams, and of the other groups'.
    """
    struck = pods.groups[STRUCK]
    others = [group for group in pods.groups if group is not struck]
    pids = {group.index: group.pids() for group in pods.groups}
    worker = struck.workers[-1]
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(RepeatedStreams(group.http_address, known))
            for group in pods.groups
        ]
        while min(each.n_between for each in streams) == 0 or streams[STRUCK].n_between < N_STREAMS - 1:
            await streams[STRUCK].arrival()
        killed_at = time.monotonic()
        worker.process.kill()
        status, body = 200, ""
        while status == 200:
            status, body = await asked(struck.http_address, "/ready")
        assert (status, json.loads(body)["status"]) == (503, "recovering")
        worker.process.wait(10)
        worker.start()
        n_looks = 0
        while (await asked(struck.http_address, "/ready"))[0] != 200:
            for group in others:
                assert (await asked(group.http_address, "/ready"))[0] == 200
            n_looks += 1
            await asyncio.sleep(_LOOK_SECONDS)
        assert n_looks > 5
        await streams[STRUCK].arrival()
        over_at = time.monotonic()
    assert not [line for each in streams for line in each.wrong]
    assert all(len(each.ended) >= N_STREAMS for each in streams)
    for group in others:
        after = await figures(group.http_address)
        assert after["orca_worker_losses_total"] == after["orca_worker_recoveries_total"] == 0
        assert group.pids() == pids[group.index] and all(one.n_starts == 1 for one in group.containers)
    after = await figures(struck.http_address)
    assert after["orca_worker_losses_total"] >= 1 and after["orca_worker_recoveries_total"] == 1
    assert [a == b for a, b in zip(struck.pids(), pids[STRUCK], strict=True)] == [True, True, False]
    return {
        "struck": longest_silence(streams[STRUCK], killed_at, over_at),
        "others": max(longest_silence(streams[group.index], killed_at, over_at) for group in others),
    }


def longest_silence(streams: RepeatedStreams, begin: float, end: float) -> float:
    """Seconds without a token of any stream."""
    times = [begin, *(moment for moment in streams.arrivals if begin < moment < end), end]
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_group_that_loses_a_worker_recovers_and_the_others_never_notice(
    pods: LoopbackPods, known: list[KnownStream]
) -> None:
    async def play() -> dict[str, float]:
        async with asyncio.timeout(SOON):
            await start(pods)
            return await lose_a_worker(pods, known)

    begun = time.monotonic()
    try:
        silence = asyncio.run(play())
    except BaseException:
        print(pods.logs())
        raise
    print(silence, time.monotonic() - begun)
    for group in pods.groups:
        assert liveness(group.server.manifest, *group.http_address) == 0
        assert group.stop() == [0, 0, 0], pods.logs()
    assert "Traceback" not in pods.logs()
    assert silence["others"] < silence["struck"] / 2, silence
