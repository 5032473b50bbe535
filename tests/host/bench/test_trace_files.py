"""Traces from files: public ones, whose samples are in tests/data/traces, and recordings."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

from server.errors import TraceError
from server.load.trace_files import MOONCAKE_BLOCK, read_trace
from tests.places import ROOT

SAMPLES = ROOT / "tests/data/traces"


def test_azure_s_lengths_and_times_are_those_of_the_file() -> None:
    path = SAMPLES / "azure_2023_code.csv"
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    trace = read_trace(path, vocab_size=1000)
    assert [len(each.prompt_ids) for each in trace] == [int(row[1]) for row in rows]
    assert [each.n_output for each in trace] == [int(row[2]) for row in rows]
    # 18:17:03.9799600 and 18:17:04.0319600, then 18:17:04.0781490; a time has six decimals.
    assert [each.arrival for each in trace[:3]] == pytest.approx([0.0, 0.052, 0.098189], abs=2e-6)
    assert max(token for each in trace for token in each.prompt_ids) < 1000


def test_mooncake_s_requests_share_the_prefixes_that_their_hashes_say() -> None:
    path = SAMPLES / "mooncake_conversation.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trace = read_trace(path, vocab_size=50_000, seed=3)
    assert [len(each.prompt_ids) for each in trace] == [line["input_length"] for line in lines]
    assert [each.n_output for each in trace] == [line["output_length"] for line in lines]
    assert [each.arrival for each in trace] == [line["timestamp"] / 1000 for line in lines]
    blocks = dict[int, set[str]]()
    hashes = dict[str, set[int]]()
    for line, request in zip(lines, trace, strict=True):
        for i, hash_id in enumerate(line["hash_ids"][: line["input_length"] // MOONCAKE_BLOCK]):
            block = request.prompt_ids[i * MOONCAKE_BLOCK : (i + 1) * MOONCAKE_BLOCK]
            digest = hashlib.sha256(repr(block).encode()).hexdigest()
            blocks.setdefault(hash_id, set()).add(digest)
            hashes.setdefault(digest, set()).add(hash_id)
    assert len(blocks) > 100
    assert all(len(each) == 1 for each in blocks.values())  # one hash, one block
    assert all(len(each) == 1 for each in hashes.values())  # and the reverse
    assert sum(line["hash_ids"].count(0) for line in lines) > 1  # some do share


def test_only_so_many_requests_of_a_file_are_read() -> None:
    path = SAMPLES / "mooncake_conversation.jsonl"
    assert read_trace(path, vocab_size=50, most=3) == read_trace(path, vocab_size=50)[:3]


def test_burstgpt_s_failed_requests_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
    )
    trace = read_trace(path, vocab_size=9)
    assert [(len(each.prompt_ids), each.n_output, each.arrival) for each in trace] == [
        (472, 18, 0.0),
        (417, 276, 113.0),
    ]


def test_a_recording_s_requests_have_their_prompts_and_the_lengths_they_reached(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text((ROOT / "tests/data/recordings/default.jsonl").read_text())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    arrived = {line["arrived"]: line for line in lines if "arrived" in line}
    ended = {line["finished"]: line["output"] for line in lines if line.get("output")}
    trace = read_trace(path, vocab_size=9)
    assert [(list(each.prompt_ids), each.n_output) for each in trace] == [
        (arrived[i]["prompt"], len(ended[i])) for i in sorted(ended)
    ]
    assert trace[0].arrival == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "neither JSON nor the header of a known table"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,1\n",
            "line 2: ContextTokens is 'many'",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", "line 2: "),
        (
            "Timestamp,Request tokens,Response tokens\n5,1,1\n4,1,1\n",
            "line 3: Timestamp is before that of the row above",
        ),
        ("Timestamp,Request tokens,Response tokens\nnan,1,1\n", "line 2: Timestamp is nan"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "hash_ids must be 2 numbers",
        ),
        (
            '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [-1]}\n',
            "hash_ids must be 1 numbers",
        ),
        ('{"timestamp": -1, "input_length": 6, "output_length": 1, "hash_ids": [1]}\n', "timestamp is -1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "input_length is 0"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.any"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"trace\\.any.*{message}"):
        read_trace(path, vocab_size=9)
