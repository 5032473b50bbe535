"""Plays a server's work on its folder while system calls fail or kill it, and checks what is left.

    LD_PRELOAD=failing_calls.so python -m tests.endpoint.batches.store_under_faults LIBRARY FIRST_SEED N_SEEDS

A process forks for each seed. The child uploads files, runs batches and deletes files, and tells its parent
what it has acknowledged to its client. One call of the system fails, several do, or the child is killed
there. Then the parent opens the folder without faults, lets the batches end, and compares everything with
what was acknowledged.
"""

import asyncio
import ctypes
import errno
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from orca_jax.errors import ConfigError
from server.batches.batch import Batch
from server.batches.lines import InputLine
from server.batches.runner import Answered
from server.batches.service import Batches
from server.errors import StoreFailed
from server.gateway.gateway import Phase
from server.http.bodies.json_text import members

URL = "/v1/completions"
SECONDS = 60.0  # of a child, and of what its parent runs afterwards
MOST_CALLS = 330  # about as many as a child makes
REFUSED = 3  # the status of a child whose server did not start


def lines_of(n: int) -> bytes:
    lines = [{"custom_id": f"line {i}", "method": "POST", "url": URL, "body": {"n": i}} for i in range(n)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def answer(_: Batch, line: InputLine) -> Answered:
    """Answer a line; every third one fails like a request with a mistake."""
    await asyncio.sleep(0)
    n = json.loads(line.body)["n"]
    return Answered(400 if n % 3 == 2 else 200, "request", b'{"n": %d}' % n)


def opened(folder: Path) -> Batches:
    pool = SimpleNamespace(n_waiting=0)
    served = SimpleNamespace(orca=SimpleNamespace(pool=pool), serving=SimpleNamespace(max_batch_size=8))
    gateway: Any = SimpleNamespace(phase=Phase.READY, served=served)
    batches = Batches(gateway, folder, max_bytes=1 << 24, max_line=1 << 16, shared=False, again_seconds=0.002)
    batches.answer, batches.read_members = answer, members
    return batches


async def ended(batches: Batches) -> None:
    while batches.table.unfinished():
        await asyncio.sleep(0.002)
    await batches.on_disk(lambda: None)  # after whatever their end leaves to do


async def upload(batches: Batches, content: bytes) -> str:
    """Upload a file like the route: on any error the file is abandoned."""
    growing = await batches.on_disk(lambda: batches.files.begin(""))
    try:
        for at in range(0, len(content), 100):
            await batches.on_disk(lambda at=at: growing.write(content[at : at + 100]))
        return (await batches.on_disk(lambda: growing.finish("in.jsonl", "batch"))).id
    except BaseException:
        await batches.on_disk(growing.abandon)
        raise


async def child(folder: Path, chance: random.Random, tell: Callable[[dict[str, Any]], None]) -> None:
    batches = opened(folder)
    batches.start()
    files: dict[str, int] = {}

    async def attempt(work: Callable[[], Any]) -> Any:
        """The answer to the client; None for an error, after which nothing may be left."""
        before = {one.id for one in batches.files.of("")}, {one.id for one in batches.table.of("")}
        try:
            return await work()
        except StoreFailed:
            now = {one.id for one in batches.files.of("")}, {one.id for one in batches.table.of("")}
            assert now[1] == before[1], "a batch exists that was not acknowledged"
            assert now[0] - before[0] <= {name for name in now[0] if is_output(batches, name)}
            return None

    for _ in range(4):
        n = chance.randint(1, 9)
        file_id = await attempt(lambda n=n: upload(batches, lines_of(n)))
        if file_id is None:
            continue
        tell({"file": file_id, "n": n})
        files[file_id] = n
        kind = chance.choice(("run", "run", "cancel", "delete"))
        if kind == "delete":
            tell({"deleting": file_id})
            await attempt(lambda name=file_id: batches.delete_file(batches.files.get(name, "")))
            continue
        stored = batches.files.get(file_id, "")
        asked = {"tenant": "", "owner": "", "endpoint": URL, "metadata": None, "input_file": stored}
        batch = await attempt(lambda asked=asked: batches.create(**cast(Any, asked)))
        if batch is None:
            continue
        tell({"batch": batch.id, "n": n})
        if kind == "cancel":
            tell({"cancelling": batch.id})
            with suppress(Exception):  # it may have ended
                await attempt(lambda batch=batch: batches.cancel(batch))
    await ended(batches)
    tell({"calls_left": LIBRARY.disarm()})
    for batch in batches.table.of(""):
        tell({"ended": batch.id, "status": batch.status})
    await batches.stop()


def is_output(batches: Batches, name: str) -> bool:
    return batches.files.get(name, "").purpose == "batch_output"


def read(batches: Batches, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    with batches.files.open(batches.files.get(file_id, "")) as file:
        return [json.loads(line) for line in file]


async def check(folder: Path, acknowledged: list[dict[str, Any]]) -> None:
    """Compare what a client finds after the next start with the answers that it got."""
    batches = opened(folder)
    batches.start()
    async with asyncio.timeout(SECONDS):
        await ended(batches)
    known = {one.id: one for one in batches.table.of("")}
    deleting = {one["deleting"] for one in acknowledged if "deleting" in one}
    cancelling = {one["cancelling"] for one in acknowledged if "cancelling" in one}
    statuses = {one["ended"]: one["status"] for one in acknowledged if "ended" in one}
    for one in acknowledged:
        if "file" in one and one["file"] not in deleting:
            with batches.files.open(batches.files.get(one["file"], "")) as file:
                assert file.read() == lines_of(one["n"]), "a file has changed"
        if "batch" in one:
            check_batch(batches, known[one["batch"]], one["n"], may_be_cut=one["batch"] in cancelling)
    for name, status in statuses.items():
        assert known[name].status == status, "a batch that had ended changed"
    on_disk = {path.name for path in (folder / "files").iterdir()}
    assert on_disk == {f"{one.id}.data" for one in batches.files.of("")}, "a file without a row, or a ghost"
    assert sum(path.stat().st_size for path in (folder / "files").iterdir()) == batches.files.n_bytes
    assert not list((folder / "batches").iterdir()), "results of a batch that has ended"
    for path in folder.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0, f"{path.name} can be read by others"
    await batches.stop()


def check_batch(batches: Batches, batch: Batch, n: int, *, may_be_cut: bool) -> None:
    output, errors = read(batches, batch.output_file_id), read(batches, batch.error_file_id)
    numbers = [[int(line["custom_id"].split()[1]) for line in lines] for lines in (output, errors)]
    for some in numbers:
        assert some == sorted(set(some)), "a line was answered twice, or the order is not the input's"
    assert (len(output), len(errors)) == (batch.completed, batch.failed)
    for line, number in zip(output, numbers[0], strict=True):
        assert line["response"]["body"] == {"n": number}
    everything = [[i for i in range(n) if i % 3 != 2], [i for i in range(n) if i % 3 == 2]]
    if batch.status == "completed":
        assert numbers == everything
    else:
        assert may_be_cut and batch.status == "cancelled", batch
        assert all(set(some) <= set(every) for some, every in zip(numbers, everything, strict=True))


def one_seed(seed: int) -> str:
    """Play a seed, and return what happened to the child process."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "store"
        folder.mkdir(mode=0o700)
        opened_once(folder)
        at, kills = chance.randrange(MOST_CALLS), chance.random() < 0.5
        n_failing = 0 if kills else chance.choice((1, 1, 2, 4, 8))
        error = chance.choice((errno.ENOSPC, errno.EIO, errno.EMFILE))
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(reader)
                signal.alarm(int(SECONDS))
                LIBRARY.arm(str(folder).encode(), at, n_failing, error)
                tell = os.fdopen(writer, "w", buffering=1)
                asyncio.run(child(folder, chance, lambda one: print(json.dumps(one), file=tell)))
                status = 0
            except ConfigError:  # the disk failed as the server started
                status = REFUSED
            except BaseException:
                LIBRARY.disarm()
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as file:
            acknowledged = [json.loads(line) for line in file]
        _, status = os.waitpid(pid, 0)
        outcome = outcome_of(os.waitstatus_to_exitcode(status), last_record(acknowledged), kills)
        asyncio.run(check(folder, acknowledged))
    return outcome


def outcome_of(status: int, end: dict[str, Any], kills: bool) -> str:
    if status == -signal.SIGKILL and kills:
        return "killed"
    if status == REFUSED and not kills:
        return "refused to start"
    assert status == 0, f"the child ended with {status}"
    return "failed" if end["calls_left"] < 0 and not kills else "undisturbed"


def opened_once(folder: Path) -> None:
    """Create the folder's database, because its first start is not tested here."""

    async def scenario() -> None:
        batches = opened(folder)
        batches.start()
        await batches.stop()

    asyncio.run(scenario())


def last_record(acknowledged: list[dict[str, Any]]) -> dict[str, Any]:
    return next((one for one in acknowledged if "calls_left" in one), {})


if __name__ == "__main__":
    LIBRARY = ctypes.CDLL(sys.argv[1])
    LIBRARY.arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int)
    LIBRARY.disarm.restype = ctypes.c_long
    first, n_seeds = int(sys.argv[2]), int(sys.argv[3])
    outcomes = Counter[str]()
    for seed in range(first, first + n_seeds):
        try:
            outcomes[one_seed(seed)] += 1
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
    print(json.dumps(outcomes))
