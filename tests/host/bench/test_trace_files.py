"""Traces from files: public ones, whose samples are in tests/data/traces, and recordings."""

import ast
import csv
import gzip
import hashlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from server.errors import TraceError
from server.load.fitted import fit
from server.load.trace import Trace, TracedRequest, mean_rate, shrunk
from server.load.trace_files import MOONCAKE_BLOCK, read_trace
from tests.places import ROOT

SAMPLES = ROOT / "tests/data/traces"
STUDY = ROOT / "bench/traces"


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


# AgentX, ServeGen, texts, and fitted traces; the samples are those of the study.


def test_agentx_s_requests_have_the_times_lengths_and_prefixes_of_the_file() -> None:
    path = STUDY / "agentx.jsonl.gz"
    with gzip.open(path, "rt") as file:
        conversations = [json.loads(line) for line in file]
    trace = read_trace(path, vocab_size=50_000, seed=5)
    expected: list[tuple[float, int, int, list[tuple[int, int]]]] = []
    n_nested = 0
    for number, conversation in enumerate(conversations):
        for each in conversation["requests"]:
            nested = each.get("requests", [each])
            n_nested += each["type"] == "subagent" and len(nested)
            for one in nested:
                at = one["t"] + (each["t"] if each["type"] == "subagent" else 0.0)
                known = [(number, hash_id) for hash_id in one["hash_ids"]]
                expected.append((at, one["in"], one["out"], known))
    expected.sort(key=lambda one: one[0])
    assert n_nested == 12
    assert [each.arrival for each in trace] == pytest.approx([one[0] for one in expected])
    assert [(len(each.prompt_ids), each.n_output) for each in trace] == [one[1:3] for one in expected]
    blocks = dict[tuple[int, int], set[tuple[int, ...]]]()
    hashes = dict[tuple[int, ...], set[tuple[int, int]]]()
    for (*_, known), request in zip(expected, trace, strict=True):
        for i, hash_id in enumerate(known):
            block = request.prompt_ids[i * 64 : (i + 1) * 64]
            blocks.setdefault(hash_id, set()).add(block)
            hashes.setdefault(block, set()).add(hash_id)
    assert all(len(each) == 1 for each in blocks.values())
    assert all(len(each) == 1 for each in hashes.values())
    assert sum(len(known) for *_, known in expected) > 2 * len(blocks)  # most blocks are shared


def test_servegen_s_clients_send_at_their_rates_with_their_lengths() -> None:
    trace = read_trace(STUDY / "servegen_deepseek_r1", vocab_size=9, seed=1)
    for number in (18, 30, 48):
        path = STUDY / f"servegen_deepseek_r1/chunk-{number}-trace.csv"
        rates = [float(row[1]) for row in csv.reader(path.read_text().splitlines())]
        mine = [each for each in trace if each.owner == f"client {number}"]
        # In each window the last of ceil(600 r) requests falls on its end, which belongs to the next.
        assert len(mine) == sum(math.ceil(600 * rate) - 1 for rate in rates)
        (lengths,) = json.loads(path.with_name(f"chunk-{number}-dataset.json").read_text()).values()
        for name, drawn in (
            ("input_tokens", [len(each.prompt_ids) for each in mine]),
            ("output_tokens", [each.n_output for each in mine]),
        ):
            shares: dict[int, float] = ast.literal_eval(lengths[name])
            mean = sum(n * share for n, share in shares.items())
            deviation = math.sqrt(sum((n - mean) ** 2 * share for n, share in shares.items()) / len(mine))
            assert abs(sum(drawn) / len(drawn) - mean) < 4 * deviation, (number, name)
            assert set(drawn) <= {max(1, n) for n in shares}
    arrivals = [each.arrival for each in trace]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals) and 1190 < arrivals[-1] < 1200


def test_texts_become_turns_that_share_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"  # made here in the form of the published files
    system = {"from": "system", "value": "You are brief."}
    path.write_text(
        json.dumps(
            [
                {
                    "id": "a",
                    "conversations": [
                        {"from": "gpt", "value": "An answer to nothing."},
                        system,
                        {"from": "human", "value": "Translate: good morning"},
                        {"from": "gpt", "value": "Bonjour."},
                        {"from": "human", "value": "And goodbye?"},
                        {"from": "gpt", "value": "Au revoir!"},
                        {"from": "human", "value": "Unanswered."},
                    ],
                },
                {"messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes"}]},
                {"conversations": [system, {"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
            ]
        )
    )
    trace = read_trace(path, vocab_size=1 << 30)
    # You are brie f . Tran slat e : good morn ing -> Bonj our . And good bye ? -> Au revo ir !
    assert [(len(one.prompt_ids), one.n_output, one.after) for one in trace] == [
        (5 + 7, 3, None),
        (4, 4, 0),
        (2, 1, None),
        (5 + 1, 1, None),
    ]
    assert trace[3].prompt_ids[:5] == trace[0].prompt_ids[:5]
    assert {one.arrival for one in trace} == {0.0}


def test_a_fitted_trace_has_the_distributions_of_the_real_one(tmp_path: Path) -> None:
    real = read_trace(STUDY / "azure_2023_conv.csv.gz", vocab_size=2)
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(fit(real, "azure")))
    made = read_trace(path, vocab_size=2, seed=7, most=2000)
    assert len(read_trace(path, vocab_size=2)) == len(real) == 1000
    assert made[:50] == read_trace(path, vocab_size=2, seed=7, most=50)

    def shape(trace: Trace) -> list[float]:
        inputs, outputs = [len(one.prompt_ids) for one in trace], [one.n_output for one in trace]
        deciles = [float(np.quantile(each, share)) for each in (inputs, outputs) for share in (0.1, 0.5, 0.9)]
        return [*deciles, sum(inputs) / len(trace), sum(outputs) / len(trace), mean_rate(trace)]

    assert shape(made) == pytest.approx(shape(real), rel=0.1)
    ranks = [np.argsort(np.argsort([value(one) for one in made])) for value in (_n_input, _n_output)]
    known = json.loads(path.read_text())["fitted"]["rank_correlation"]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] == pytest.approx(known, abs=0.05)


def _n_input(request: TracedRequest) -> int:
    return len(request.prompt_ids)


def _n_output(request: TracedRequest) -> int:
    return request.n_output


def test_shrunk_requests_share_the_same_prefixes() -> None:
    trace = read_trace(STUDY / "mooncake_conversation.jsonl.gz", vocab_size=1 << 30, most=60)
    small = shrunk(trace, 32)
    assert [_n_input(one) for one in small] == [-(-_n_input(one) // 32) for one in trace]
    assert [one.n_output for one in small] == [-(-one.n_output // 32) for one in trace]

    def shared(requests: Trace) -> list[int]:
        pairs = itertools.pairwise(sorted(one.prompt_ids for one in requests))
        same = ((a == b for a, b in zip(*pair, strict=False)) for pair in pairs)
        return [sum(itertools.takewhile(bool, each)) for each in same]

    assert [-(-n // 32) for n in shared(trace)] == shared(small)
    assert max(shared(small)) >= 16


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"block_size": 64, "requests": [{"t": 0, "in": 65, "out": 1, "hash_ids": []}]}',
            "hash_ids must be 1",
        ),
        ("a.json", '{"block_size": 64,\n "requests": 3}', "requests must be a list"),
        ("a.json", '[{"conversations": [{"from": "human"}]}]', "a message must have from and value"),
        ("a.json", '{"fitted": {"gaps": [1]}}', "gaps must be 23 ascending numbers"),
        ("chunk-1-trace.csv", "0,1,1,Pareto,1,1\n", "line 1: pattern is 'Pareto'"),
        ("chunk-1-trace.csv", "0,1\n", "is no client of ServeGen"),
        ("notes.txt", "", "is no trace; a directory has"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path if name == "a.json" else tmp_path, vocab_size=9)
