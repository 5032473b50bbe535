"""The files of the disk tier: whole or not there, bounded, and known by all that their bytes depend on."""

import threading
from pathlib import Path

import pytest

from orca_jax.engine.block_files import BlockFiles
from orca_jax.errors import ConfigError
from tests.host.engines import SOON

HEADER = 52
HASHES = [bytes([i]) * 32 for i in range(6)]


class Woken:
    """Counts the blocks that were read."""

    def __init__(self) -> None:
        self._reads = threading.Semaphore(0)

    def __call__(self) -> None:
        self._reads.release()

    def wait(self, n: int) -> None:
        for _ in range(n):
            assert self._reads.acquire(timeout=SOON)


@pytest.fixture
def woken() -> Woken:
    return Woken()


def loaded(files: BlockFiles, woken: Woken, hashes: list[bytes]) -> dict[bytes, bytes | None]:
    files.wake = woken
    files.read(hashes)
    woken.wait(len(hashes))
    return dict(files.take_loaded())


def written(directory: Path, blocks: dict[bytes, bytes], fingerprint: str = "a", most: int = 1 << 20) -> None:
    files = BlockFiles(directory, fingerprint, most)
    for block_hash, data in blocks.items():
        assert files.write(block_hash, [data[:3], data[3:]])
    files.close()


def file_of(directory: Path, block_hash: bytes) -> Path:
    (found,) = directory.rglob(f"*{block_hash.hex()}")
    return found


def test_blocks_are_read_after_a_restart(tmp_path: Path, woken: Woken) -> None:
    blocks = {HASHES[0]: b"0123456", HASHES[1]: b"another"}
    written(tmp_path / "new" / "directory", blocks)
    files = BlockFiles(tmp_path / "new" / "directory", "a", 1 << 20)
    assert [block_hash in files for block_hash in HASHES[:3]] == [True, True, False]
    assert loaded(files, woken, HASHES[:3]) == {**blocks, HASHES[2]: None}
    assert (files.n_read, files.n_bad, files.n_bytes) == (2, 1, 2 * (HEADER + 7))
    files.close()


def test_another_fingerprint_finds_nothing(tmp_path: Path, woken: Woken) -> None:
    written(tmp_path, {HASHES[0]: b"0123456"})
    files = BlockFiles(tmp_path, "b", 1 << 20)
    assert HASHES[0] not in files and files.n_blocks == 1
    assert loaded(files, woken, HASHES[:1]) == {HASHES[0]: None}
    files.close()
    assert len([*tmp_path.rglob(f"*{HASHES[0].hex()}")]) == 1, "it is not the other's to remove"


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "magic", "renamed", "empty", "gone"])
def test_a_damaged_file_is_not_there(tmp_path: Path, woken: Woken, damage: str) -> None:
    written(tmp_path, {HASHES[0]: b"0123456", HASHES[1]: b"another"})
    path = file_of(tmp_path, HASHES[0])
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-1])
        case "longer":
            path.write_bytes(data + b"0")
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "magic":
            path.write_bytes(b"?" + data[1:])
        case "renamed":
            path.write_bytes(file_of(tmp_path, HASHES[1]).read_bytes())
        case "empty":
            path.write_bytes(b"")
        case _:
            pass
    files = BlockFiles(tmp_path, "a", 1 << 20)
    if damage == "gone":
        path.unlink()
    assert loaded(files, woken, HASHES[:2]) == {HASHES[0]: None, HASHES[1]: b"another"}
    assert HASHES[0] not in files and not path.exists()
    assert files.n_bytes == HEADER + 7
    files.close()


def test_bytes_are_bounded_and_what_was_used_longest_ago_goes(tmp_path: Path, woken: Woken) -> None:
    each = HEADER + 7
    files = BlockFiles(tmp_path, "a", 3 * each)
    for block_hash in HASHES[:3]:
        files.write(block_hash, [b"0123456"])
    files.write(HASHES[5], [bytes(3 * each)])  # larger than all there may be
    files.close()
    files = BlockFiles(tmp_path, "a", 3 * each)
    assert loaded(files, woken, HASHES[:1]) == {HASHES[0]: b"0123456"}
    files.write(HASHES[3], [b"0123456"])
    files.write(HASHES[4], [b"0123456"])
    files.close()
    files = BlockFiles(tmp_path, "a", 3 * each)
    assert [block_hash in files for block_hash in HASHES] == [True, False, False, True, True, False]
    assert sum(path.stat().st_size for path in tmp_path.rglob("a-*")) == files.n_bytes == 3 * each
    files.close()


def test_what_was_not_written_whole_is_removed(tmp_path: Path) -> None:
    written(tmp_path, {HASHES[0]: b"0123456"})
    half = file_of(tmp_path, HASHES[0])
    half = half.rename(half.with_name(half.name + ".new"))
    files = BlockFiles(tmp_path, "a", 1 << 20)
    assert HASHES[0] not in files and not half.exists()
    files.close()


def test_a_directory_has_one_engine(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, "a", 1 << 20)
    with pytest.raises(ConfigError, match="another engine uses; give each a directory of its own"):
        BlockFiles(tmp_path, "a", 1 << 20)
    files.close()
    BlockFiles(tmp_path, "a", 1 << 20).close()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"kv_disk is .*, which cannot be used"):
        BlockFiles(tmp_path / "file", "a", 1 << 20)
