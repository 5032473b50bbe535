"""The output of `orca generate` as a journal: a killed run leaves it valid, and the next run continues it."""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.commands.answer_file import AnswerFile, locked_answers
from server.errors import UsageError

MODEL = "0123456789abcdef"


def record(line: int, text: str = "", *, error: bool = False, request: int = 0, model: str = MODEL) -> bytes:
    values: dict[str, Any] = {
        "line": line,
        "request_hash": f"{request or line:016x}",
        "model_hash": model,
        **({"error": {"type": "BadLine"}} if error else {}),
        "text": text,
    }
    return json.dumps(values).encode() + b"\n"


@contextmanager
def opened(path: Path, *, overwrite: bool = False) -> Iterator[AnswerFile]:
    with open(path, "r+b", buffering=0) as file:
        yield locked_answers(file, str(path), overwrite=overwrite)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_records_of_an_earlier_run_are_kept_and_the_torn_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = record(1, "a" * 100_000) + record(3, "b", error=True)
    for n in range(1, len(record(4))):
        path.write_bytes(whole + record(4)[:n])
        with opened(path) as answers:
            assert (len(answers), answers.last_line, answers.model_hash) == (2, 3, MODEL)
            assert answers.kept(1) == (f"{1:016x}", False)
            assert answers.kept(2) is None
            assert answers.kept(3) == (f"{3:016x}", True)
            assert answers.kept(4) is None
            assert path.read_bytes() == whole + record(4)[:n], "nothing is changed before the first record"
            if n % 2:
                answers.append(record(4))
            answers.finish()
        assert path.read_bytes() == (whole + record(4) if n % 2 else whole)


def test_two_records_of_a_line_become_the_later_one_in_the_input_s_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = [record(1), record(2, error=True), record(5, error=True), record(6)]
    path.write_bytes(b"".join(first))
    path.chmod(0o640)
    again = [record(5, "better", request=7), record(2, "no better", error=True), record(9)]
    with opened(path) as answers:
        for one in again:
            answers.append(one)
        assert answers.kept(5) == (f"{7:016x}", False)
    assert path.read_bytes() == b"".join(first + again), "until the run is complete they are only appended"
    with opened(path) as answers:
        assert len(answers) == 5
        answers.append(record(4, "of a line that was blank"))
        answers.finish()
    wanted = [record(1), again[1], record(4, "of a line that was blank"), again[0], record(6), record(9)]
    assert path.read_bytes() == b"".join(wanted)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path, link = tmp_path / "disk" / "out.jsonl", tmp_path / "link"
    path.write_bytes(record(1, error=True) + record(2))
    link.symlink_to(path)
    with opened(link) as answers:
        answers.append(record(1))
        answers.finish()
    assert link.is_symlink()
    assert path.read_bytes() == record(1) + record(2)


FOREIGN = [
    b"hello",
    b"hello\n",
    b'{"line": 1}\n',
    b'{"line": 1, "prompt": "of an earlier version", "text": ""}\n',
    b'{"line": "',
    b'{"line": 1' + b" " * 300,
    record(1) + b"\n",
    record(1) + b"\0" * 100,
    record(1) + record(2)[:-2] + b"\n" + record(3),
    b"\xff" * 100_000,
]


@pytest.mark.parametrize("data", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_not_ours_is_refused_and_not_touched(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(data)
    if data == FOREIGN[4]:  # nothing says that this is not the beginning of a record
        with opened(path) as answers:
            assert len(answers) == 0
    else:
        with pytest.raises(UsageError, match="not an answer that orca generate") as caught, opened(path):
            pass
        assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == data
    with opened(path, overwrite=True) as answers:
        assert path.read_bytes() == data, "until there is something to replace it"
        answers.append(record(1))
        assert path.read_bytes() == record(1)


def test_an_empty_run_overwrites_too(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"hello")
    with opened(path, overwrite=True) as answers:
        answers.finish()
    assert path.read_bytes() == b""


def test_answers_of_two_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(record(1) + record(2, model="f" * 16))
    with pytest.raises(UsageError, match="answers of two models"), opened(path):
        pass


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.touch()
    with opened(path), pytest.raises(UsageError, match="another orca generate writes"), opened(path):
        pass
    with opened(path) as answers:
        assert len(answers) == 0


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=40),
    st.lists(st.integers(0, 40), max_size=3),
)
def test_any_order_of_records_with_restarts_ends_sorted(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, bool]], restarts: list[int]
) -> None:
    """Compared with a dictionary, which keeps the last of each line."""
    path = tmp_path_factory.mktemp("answers") / "out.jsonl"
    path.touch()
    records = [record(line, f"{i}" * i, error=error) for i, (line, error) in enumerate(written)]
    cuts = sorted({0, *(min(cut, len(records)) for cut in restarts), len(records)})
    for begin, end in itertools.pairwise(cuts):
        with opened(path) as answers:
            for one in records[begin:end]:
                answers.append(one)
    wanted = {line: one for (line, _), one in zip(written, records, strict=True)}
    with opened(path) as answers:
        assert {line: answers.kept(line) is not None for line in range(13)} == {
            line: line in wanted for line in range(13)
        }
        answers.finish()
    assert path.read_bytes() == b"".join(wanted[line] for line in sorted(wanted))


def test_a_sorted_file_that_was_not_put_in_place_is_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(record(1, error=True) + record(2) + record(1))

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed), opened(path) as answers:
            answers.finish()
    assert path.read_bytes() == record(1, error=True) + record(2) + record(1)
    with opened(path) as answers:
        answers.finish()
    assert lines_of(path) == [json.loads(record(1)), json.loads(record(2))]
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]
