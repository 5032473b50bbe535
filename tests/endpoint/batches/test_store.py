"""The store of files: whatever clients do, it stays within its bounds, and a restart finds what there was."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.batches import files
from server.batches.files import FileStore, GrowingFile, StoredFile
from server.errors import StoreFull, UnknownFile

MAX_BYTES, MAX_EACH, MAX_FILES = 1000, 600, 6
TENANTS = ("", "a", "b")
DOINGS = st.tuples(
    st.sampled_from(["begin", "write", "finish", "abandon", "delete", "restart"]),
    st.sampled_from(TENANTS),
    st.integers(0, 700),
)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")


@settings(max_examples=150, deadline=None)
@given(doings=st.lists(DOINGS, max_size=40))
def test_it_stays_within_its_bounds(doings: list[tuple[str, str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as name:
        patch.setattr(files, "MAX_FILES", MAX_FILES)
        folder = Path(name)
        store = FileStore(folder, max_bytes=MAX_BYTES, max_each=MAX_EACH)
        growing: list[tuple[str, GrowingFile, bytes]] = []
        stored: dict[str, tuple[str, bytes]] = {}
        for doing, tenant, n in doings:
            if doing == "begin":
                try:
                    growing.append((tenant, store.begin(tenant), b""))
                    assert len(growing) + len(stored) <= MAX_FILES
                except StoreFull:
                    assert len(growing) + len(stored) == MAX_FILES
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
                    file.flush()
                    assert fits
                    growing[growing.index((whose, file, have))] = whose, file, have + data
                except StoreFull:
                    assert not fits
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
                store = FileStore(folder, max_bytes=MAX_BYTES, max_each=MAX_EACH)
                store.forget_growing(set())
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


def test_a_file_of_lines_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=MAX_BYTES, max_each=MAX_EACH)
    file = store.begin("a")
    file.write(b"one\ntwo\nthr")
    file.close()
    again = FileStore(tmp_path, max_bytes=MAX_BYTES, max_each=MAX_EACH)
    reopened, lines = again.reopen(file.id, "a")
    assert (list(lines), again.n_bytes) == ([b"one\n", b"two\n"], 8)
    reopened.write(b"three\n")
    stored: StoredFile = reopened.finish("name", "batch_output")
    with again.open(stored) as whole:
        assert whole.read() == b"one\ntwo\nthree\n"
    assert again.n_bytes == stored.n_bytes == 14
