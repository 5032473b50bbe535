"""The store of files: whatever clients do, it stays within its bounds, and a restart finds what there was."""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.errors import ConfigError
from server.batches import files
from server.batches.batch import new_batch
from server.batches.database import Database, store_error
from server.batches.files import FileStore, GrowingFile
from server.batches.results import Result
from server.batches.service import Batches
from server.batches.table import BatchTable
from server.errors import DiskFull, StoreFailed, StoreFull, UnknownFile
from server.statuses import meaning

MAX_BYTES, MAX_EACH, MAX_FILES = 1000, 600, 5
MAX_FILES_EACH = 3  # the same part of the number as of the bytes
TENANTS = ("", "a", "b")
DOINGS = st.tuples(
    st.sampled_from(["begin", "write", "finish", "abandon", "delete", "restart"]),
    st.sampled_from(TENANTS),
    st.integers(0, 700),
)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[FileStore, Database]]:
    database = Database(folder)
    yield FileStore(folder / "files", database, max_bytes=MAX_BYTES, max_each=MAX_EACH), database
    database.close()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "files").iterdir())


@settings(max_examples=40, deadline=None)
@given(doings=st.lists(DOINGS, max_size=40))
def test_it_stays_within_its_bounds(doings: list[tuple[str, str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        patch.setattr(files, "MAX_FILES", MAX_FILES)
        folder = Path(name)
        database = Database(folder)
        store = FileStore(folder / "files", database, max_bytes=MAX_BYTES, max_each=MAX_EACH)
        growing: list[tuple[str, GrowingFile, bytes]] = []
        stored: dict[str, tuple[str, bytes]] = {}
        for doing, tenant, n in doings:
            if doing == "begin":
                n_own = [whose for whose, *_ in (*growing, *stored.values())].count(tenant)
                fits = n_own < MAX_FILES_EACH and len(growing) + len(stored) < MAX_FILES
                try:
                    growing.append((tenant, store.begin(tenant), b""))
                    assert fits
                except StoreFull as error:
                    is_own = f"{MAX_FILES_EACH} files, and 3 are allowed" in str(error)
                    assert (fits, is_own) == (False, n_own == MAX_FILES_EACH)
            elif doing == "write" and growing:
                whose, file, have = growing[n % len(growing)]
                data = bytes([n % 256]) * n
                used = {
                    one: sum(len(d) for t, _, d in growing if t == one)
                    + sum(len(d) for t, d in stored.values() if t == one)
                    for one in TENANTS
                }
                fits = used[whose] + n <= MAX_EACH and sum(used.values()) + n <= MAX_BYTES
                try:
                    file.write(data)
                    assert fits
                    growing[growing.index((whose, file, have))] = whose, file, have + data
                except StoreFull as error:
                    assert not fits
                    numbers = {int(number) for number in re.findall(r"\d+", str(error))}
                    assert numbers <= {MAX_BYTES, MAX_EACH, used[whose]}, "it reveals how much others have"
            elif doing == "finish" and growing:
                whose, file, have = growing.pop(n % len(growing))
                stored[file.finish("name", "batch").id] = whose, have
            elif doing == "abandon" and growing:
                growing.pop(n % len(growing))[1].abandon()
            elif doing == "delete" and stored:
                file_id = sorted(stored)[n % len(stored)]
                store.delete(store.get(file_id, stored.pop(file_id)[0]))
            elif doing == "restart":
                for _, file, _ in growing:
                    file.close()
                growing.clear()
                database.close()
                database = Database(folder)
                store = FileStore(folder / "files", database, max_bytes=MAX_BYTES, max_each=MAX_EACH)
            assert store.n_bytes == on_disk(folder) <= MAX_BYTES
            for one in TENANTS:
                own = {file_id: data for file_id, (whose, data) in stored.items() if whose == one}
                assert {found.id for found in store.of(one)} == own.keys()
        for _, file, _ in growing:
            file.abandon()
        for file_id, (whose, data) in stored.items():
            with store.open(store.get(file_id, whose)) as file:
                assert file.read() == data
            with pytest.raises(UnknownFile):
                store.get(file_id, whose + "x")
        database.close()


def test_a_key_fills_its_share_of_the_number_and_learns_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 5)
    with opened(tmp_path) as (store, _):
        growing = [store.begin("a") for _ in range(MAX_FILES_EACH)]
        with pytest.raises(StoreFull, match="your API key has 3 files, and 3 are allowed; delete some"):
            store.begin("a")
        growing[0].write(b"x" * 587)
        growing += [store.begin("b"), store.begin("b")]
        with pytest.raises(StoreFull, match="the server keeps 5 files, the limit; try again later"):
            store.begin("b")
        with pytest.raises(StoreFull) as caught:
            growing[-1].write(b"x" * 500)
        assert "all clients' files together would have more than 1000 bytes" in str(caught.value)
        assert "587" not in str(caught.value)
        growing[1].abandon()
        growing[1] = store.begin("a")
        for file in growing:
            file.abandon()


def test_results_continue_after_the_last_one_written(tmp_path: Path) -> None:
    """Bytes without a row, such as a killed server leaves, are dropped and not counted."""
    batch = new_batch(tenant="a", owner="a", endpoint="/v1/completions", input_file_id="f", metadata=None)
    with opened(tmp_path) as (store, database):
        table = BatchTable(tmp_path / "batches", database, store)
        results = table.results_of(batch)
        results.record([Result(2, True, b"two\n"), Result(0, False, b"zero\n")])
        results.close()
        assert store.n_bytes == 0  # those of a batch that does not run
    with (tmp_path / "batches" / f"{batch.id}.results").open("ab") as file:
        file.write(b"cut o")
    with opened(tmp_path) as (store, database):
        results = BatchTable(tmp_path / "batches", database, store).results_of(batch)
        assert (results.done, results.n_ok, results.n_failed, store.n_bytes) == ({0, 2}, 1, 1, 9)
        results.record([Result(1, True, b"one\n")])
        file = store.begin("a", counted=False)
        results.copy(results.places(ok=True), file)
        results.close()
        stored = file.finish("name", "batch_output")
        with store.open(stored) as whole:
            assert whole.read() == b"one\ntwo\n"  # in the order of the input
        assert store.n_bytes == 8


# A folder that the server does not understand is left as it is.


def batches_in(folder: Path) -> Batches:
    gateway: Any = SimpleNamespace()
    return Batches(gateway, folder, max_bytes=1 << 20, max_line=1 << 16, shared=False)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one client's file."""
    with opened(tmp_path) as (store, _):
        growing = store.begin("a")
        growing.write(b"precious\n")
        growing.finish("a.jsonl", "batch")
    return tmp_path


def newer_tables(folder: Path) -> None:
    with sqlite3.connect(folder / "store.sqlite") as database:
        database.execute("PRAGMA user_version = 7")
    database.close()


def newer_batch(folder: Path) -> None:
    with sqlite3.connect(folder / "store.sqlite") as database:
        database.execute("INSERT INTO batches VALUES ('batch_1', 'a', '{\"new\": 1}')")
    database.close()


def no_database(folder: Path) -> None:
    (folder / "store.sqlite").write_bytes(b"rubbish" * 1000)


def older_files(folder: Path) -> None:
    (folder / "files" / "file-1.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (newer_tables, "has tables of version 7, and this program reads 1"),
        (newer_batch, "batch_1 in store.sqlite cannot be read"),
        (no_database, "file is not a database"),
        (older_files, "is of orca_jax 0.2"),
    ],
)
def test_the_server_does_not_start_and_changes_nothing(folder: Path, change: Any, words: str) -> None:
    change(folder)
    before = everything_in(folder)
    with pytest.raises(ConfigError, match=words):
        batches_in(folder)
    assert {name: data for name, data in everything_in(folder).items() if name in before} == before


def test_files_that_it_does_not_know_are_kept_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "files" / "file-other.data").write_bytes(b"of somebody")
    with opened(folder) as (store, _):
        assert len(store.of("a")) == 1
    assert (folder / "files" / "file-other.data").read_bytes() == b"of somebody"
    assert "such as file-other.data; they are left as they are" in caplog.text


def test_a_file_whose_content_is_gone_is_kept_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator may restore the content from a backup, and then the file is as before."""
    (content,) = (folder / "files").glob("*.data")
    content.rename(folder / "away")
    with opened(folder) as (store, _):
        (stored,) = store.of("a")
        with pytest.raises(UnknownFile, match="is missing on the server's disk"):
            store.open(stored)
    assert "cannot be read" in caplog.text
    (folder / "away").rename(content)
    with opened(folder) as (store, _), store.open(store.get(stored.id, "a")) as file:
        assert file.read() == b"precious\n"


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="which another server uses"):
        Database(tmp_path)
    Database(tmp_path).close()


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), DiskFull, 507),
        (OSError(errno.EIO, os.strerror(errno.EIO)), StoreFailed, 503),
        (sqlite3.OperationalError("disk I/O error"), StoreFailed, 503),
    ],
)
def test_a_disk_that_fails_has_its_status(error: Any, kind: type[StoreFailed], status: int) -> None:
    found = store_error(error)
    assert type(found) is kind and meaning(found).http == status
