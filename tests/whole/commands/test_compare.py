"""The comparison with other engines: flags, pipes, servers that fall short, and the whole command."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from rich.progress import Progress

from bench.compare import SERVER, Address, main, parse, parse_address, parse_arguments, parse_peer, variables
from bench.peers.checkpoint import write_random_checkpoint
from bench.peers.engine_process import EngineEnded, EngineProcess
from bench.peers.http_engine import AddressFailed, HttpEngine
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.orca_server import as_flags
from bench.peers.played import Played
from bench.peers.rounds import OURS, Rounds, play_in_turn, raw, summary, table, warnings
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.families.hf_config import read_config
from server.load.trace import TracedRequest, homogeneous_trace
from tests.gpt_config import gpt_config
from tests.places import DATA

ECHO = """
import time
from bench.peers.child import serve

print("what is said before the start is none either")

def start(flags, closing):
    print("a library's own words are no answer")
    def play(playing):
        while indices := playing.next_arrivals():
            for i in indices:
                request = playing.requests[i]
                playing.done(i, list(request.prompt)[:1] * (request.n_output - flags["missing"]))
    return play, {"versions": "1", "flags": flags}

serve(start)
"""
# The package of llama.cpp, whose server is the stub at the address in a variable. It ends with its object.
XLLAMACPP = """
import os, sys
from types import SimpleNamespace

def CommonParams():
    threads = [SimpleNamespace(n_threads=-1) for _ in range(2)]
    return SimpleNamespace(model=SimpleNamespace(path=""), cpuparams=threads[0], cpuparams_batch=threads[1])

class Server:
    def __init__(self, params):
        assert (params.model.path, params.n_parallel, params.n_ctx) == ("m.gguf", 4, 160), params
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2, params
        assert params.cont_batching and params.n_batch == 64, params
        self.listening_address = os.environ["STUB"]

    def __del__(self):
        self.listening_address = None
        print("the server ended", file=sys.stderr, flush=True)
"""
# It takes its first question, and nothing after it.
DEAF = """
import sys, time
sys.stdin.readline()
print('{"versions": "1", "flags": {}}', flush=True)
time.sleep(600)
"""
EQUAL = homogeneous_trace(2, n_input=32, n_output=4, vocab_size=100)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with engines that need no model."""
    (tmp_path / "echo_engine.py").write_text(ECHO)
    (tmp_path / "deaf_engine.py").write_text(DEAF)
    (tmp_path / "xllamacpp.py").write_text(XLLAMACPP)
    (tmp_path / "xllamacpp-1.2.dist-info").mkdir()
    (tmp_path / "xllamacpp-1.2.dist-info" / "METADATA").write_text("Name: xllamacpp\nVersion: 1.2\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


# Flags.


def test_flags_are_read() -> None:
    assert parse_peer("vllm=/a/python") == ("vllm", "/a/python")
    assert parse_address("x=http://h:1/v1,model=m,cache_prompt=false,n=2,why=a=b") == Address(
        "x", "http://h:1/v1", "m", {"cache_prompt": False, "n": 2, "why": "a=b"}
    )
    assert parse_arguments('server={"max_batch_size": 3}') == (SERVER, {"max_batch_size": 3})
    flags = parse(["--rate", "1.1,2", "--requests", "3", "--peer", "vllm=p", "--server"])
    assert list(flags.traces) == ["paper, 1.1/s", "paper, 2/s"]
    fast, slow = flags.traces["paper, 2/s"], flags.traces["paper, 1.1/s"]
    assert [request.prompt_ids for request in fast] == [request.prompt_ids for request in slow]
    assert 0 < fast[0].arrival < slow[0].arrival
    flags = parse(["--rate", "0.5", "--conversations", "2"])
    assert [len(trace) for trace in flags.traces.values()] == [16]
    assert list(parse([]).traces) == ["paper", "equal, 1", "equal, 8", "equal, 32"]
    assert list(parse(["--requests", "0", "--equal", "2"]).traces) == ["equal, 2"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--peer", "vllm"], "not NAME=PYTHON"),
        (["--peer", "sglang=p"], "one of vllm"),
        (["--peer", "vllm=p", "--peer", "vllm=q"], "a name of its own: vllm"),
        (["--address", "x=https://h"], "not NAME=http"),
        (["--address", "x=http://h,cache"], "not KEY=VALUE"),
        (["--address", "orca_jax=http://h"], "a name of its own: orca_jax"),
        (["--arguments", "nobody={}"], "one of orca_jax, server, vllm"),
        (["--arguments", "vllm=[]"], "not ENGINE"),
        (["--rate", "0"], "not above 0"),
        (["--equal", "8,-1"], "not above 0"),
        (["--conversations", "3"], "needs --rate"),
        (["--rate", "1", "--trace", "x.jsonl"], "leave --rate out"),
        (["--trace", "x.jsonl"], "No such file"),
        (["--rate", "1", "--requests", "0"], "give --requests"),
        (["--requests", "0", "--equal", ""], "there is no trace"),
        (["--peer", "llama.cpp=p"], "reads GGUF files; --model is gpt2"),
        (["--rounds", "0"], "at least 1"),
        (["--rest", "-1"], "0 or more"),
        (["--model", "demo"], "the model has 512 positions"),
        (["--model", "/nowhere"], "no config.json"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(words)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_variables_and_flags_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert variables("vllm", sys.executable, 2)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert variables("vllm", sys.executable, 2)["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert variables("transformers", sys.executable, 2) == {}
    assert as_flags({"max_batch_size": 8, "overlap": False, "deterministic": True}) == [
        *("--max-batch-size", "8", "--no-overlap", "--deterministic")
    ]


# Pipes.


@pytest.mark.usefixtures("modules")
def test_rounds_alternate_and_the_warm_up_does_not_count() -> None:
    late = tuple(TracedRequest(request.prompt_ids, 4, arrival=0.02 * i) for i, request in enumerate(EQUAL))
    with (
        EngineProcess(OURS, sys.executable, "echo_engine") as ours,
        EngineProcess("b", sys.executable, "echo_engine") as other,
    ):
        for engine, missing in ((ours, 0), (other, 1)):
            engine.start({"missing": missing})
            assert engine.about["flags"] == {"missing": missing}
        result = play_in_turn([ours, other], {"late": late}, 3, Progress(disable=True))
    (rounds,) = result.values()
    assert [len(rounds.played[name]) for name in (OURS, "b")] == [3, 3]
    assert all(play.seconds >= 0.02 and min(play.latency) >= 0 for play in rounds.played[OURS])
    assert rounds.missing(OURS) == 0
    assert rounds.missing("b") == 2
    agreed = rounds.agreement("b")
    assert agreed is not None
    assert (agreed.requests, agreed.of, agreed.tokens) == (0, 2, 0.75)
    (line,) = warnings(result)
    assert line.startswith("! b, late: 2 of 8 tokens are missing")


@pytest.mark.usefixtures("modules")
def test_an_engine_that_ends_reports_why() -> None:
    with EngineProcess("gone", sys.executable, "echo_engine") as engine:
        engine.start({})
        with pytest.raises(EngineEnded, match=r"(?s)gone ended:.*KeyError: 'missing'"):
            engine.play(EQUAL)
    with (
        EngineProcess("none", sys.executable, "no_such_module") as engine,
        pytest.raises(EngineEnded, match="No module named"),
    ):
        engine.start({})
    with pytest.raises(EngineEnded, match="nowhere did not start"):
        EngineProcess("nowhere", "/no/such/python", "echo_engine")


@pytest.mark.usefixtures("modules")
def test_an_engine_that_does_not_answer_is_killed_at_its_deadline() -> None:
    long = homogeneous_trace(40, n_input=2000, n_output=1, vocab_size=50000)  # more than a pipe holds
    with EngineProcess("deaf", sys.executable, "deaf_engine", play_seconds=0.3) as engine:
        engine.start({})
        with pytest.raises(EngineEnded, match=r"deaf gave no answer within 0\.3 seconds, and was killed"):
            engine.play(long)


# The table.


def test_the_table_and_the_record_have_pairwise_ratios() -> None:
    trace = (TracedRequest((1,), 100),)
    rounds = Rounds(trace)
    cases = ((OURS, (100.0, 50.0), (0.1, 0.2)), ("b", (50.0, 20.0), (0.5, 0.5)))
    for name, rates, firsts in cases:
        rounds.played[name] = [
            Played(100 / rate, (100 / rate,), (100,), first_token=(first,))
            for rate, first in zip(rates, firsts, strict=True)
        ]
        rounds.warm[name] = Played(1.0, (1.0,), (100,), None if name == "b" else ((1,) * 100,))
    result = {"paper": rounds}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(result))
    row = next(line for line in captured.get().splitlines() if "│ b" in line)
    assert "35.0 (20.0 to 50.0)" in row
    assert "2.25" in row  # rates: 2 and 2.5
    assert "0.45" in row  # latencies: 10 over 20 and 20 over 50 ms
    assert "unknown" in row
    figures = summary(result)["paper"]
    assert figures["b"]["ours_over_theirs"] == {
        "tokens_per_second": 2.25,
        "normalized_latency": {"p50": 0.45, "p90": 0.45, "p99": 0.45},
        "first_token": {"p50": 0.3, "p90": 0.3, "p99": 0.3},
    }
    assert figures["b"]["normalized_latency_ms"]["p99"] == [20.0, 50.0]
    assert figures[OURS]["requests_per_second"] == [1.0, 0.5]
    assert [(play["engine"], play["round"], play["seconds"]) for play in raw(result)] == [
        *((OURS, 1, 1.0), (OURS, 2, 2.0), ("b", 1, 2.0), ("b", 2, 5.0))
    ]


# Servers.


class Stub(BaseHTTPRequestHandler):
    """A server without `ignore_eos` and usage that ends every output after three tokens."""

    asked: ClassVar[list[dict[str, Any]]] = []
    most = 3
    takes_ids = True

    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": "stub-model"}]}, "/version": {"version": "9.9"}}
        result = answers.get(self.path)
        self._answer(200 if result else 404, json.dumps(result or {}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.path != "/v1/completions" or not self.takes_ids:
            self._answer(422, b'{"error": "a prompt is a text"}', "application/json")
        elif {"ignore_eos", "stream_options", "cache_salt"} & body.keys():
            self._answer(400, b'{"error": "unknown field"}', "application/json")
        else:
            n = min(self.most, body["max_tokens"])
            event = "data:" + json.dumps({"choices": [{"text": "a"}]}) + "\r\n\r\n"
            self._answer(200, (event * n + "data: [DONE]\r\n\r\n").encode(), "text/event-stream")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(stub: type[Stub]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), stub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_requests_have_the_server_s_form_and_its_tokens_are_counted() -> None:
    stub = type("Fresh", (Stub,), {"asked": []})
    trace = (TracedRequest((5, 6), 2), TracedRequest((7,), 8, arrival=0.05))
    with serving(stub) as url, HttpEngine("stub", url + "/v1/", body={"cache_prompt": False}) as engine:
        engine.start()
        flags = engine.about["flags"]
        assert flags["model"] == "stub-model"
        assert flags["sent"].keys() == {
            *("model", "max_tokens", "temperature", "stream", "min_tokens", "cache_prompt")
        }
        assert "version 9.9" in engine.about["versions"]
        assert engine.about["token ids by"] is None
        stub.asked.clear()
        played = engine.play(trace)
        assert engine.warm_up(trace).token_ids is None
    first, second = stub.asked[:2]
    assert (first["prompt"], first["max_tokens"], first["min_tokens"]) == ([5, 6], 2, 2)
    assert (second["prompt"], second["max_tokens"], second["min_tokens"]) == ([7], 8, 8)
    assert first["cache_prompt"] is False
    assert played.n_tokens == (2, 3)
    assert played.missing(trace) == 5
    assert played.seconds >= 0.05
    assert played.latency[1] <= played.seconds - 0.05 + 1e-6
    rounds = Rounds(trace, played={OURS: [played], "stub": [played]}, warm={OURS: played, "stub": played})
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table({"paper": rounds}))
    assert any("│ stub" in line and " !" in line for line in captured.get().splitlines())
    assert "! stub, paper: 5 of 10 tokens are missing" in warnings({"paper": rounds})[1]


@pytest.mark.usefixtures("modules")
def test_llama_cpp_serves_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = type("Llama", (Stub,), {"asked": []})
    flags = {"checkpoint": "m.gguf", "cores": 2, "max_batch_size": 4, "longest": 40}
    with serving(stub) as url:
        monkeypatch.setenv("STUB", url)
        with LlamaCpp("llama.cpp", sys.executable) as engine:
            engine.start(flags | {"arguments": {"n_batch": 64}})
            assert "xllamacpp 1.2" in engine.about["versions"]
            assert engine.about["flags"]["n_ctx"] == 160
            assert engine.about["flags"]["sent"]["cache_prompt"] is False
            assert engine.play((TracedRequest((5, 6), 2),)).n_tokens == (2,)
            assert engine.warm_up((TracedRequest((7,), 3),)).n_tokens == (3,)
        with (
            LlamaCpp("llama.cpp", sys.executable) as engine,
            pytest.raises(EngineEnded, match=r"(?s)llama\.cpp ended:.*AssertionError"),
        ):
            engine.start({**flags, "longest": 50, "arguments": {}})
    assert [(asked["prompt"], asked["max_tokens"]) for asked in stub.asked[-2:]] == [([5, 6], 2), ([7], 3)]


def test_a_server_that_cannot_be_measured_reports_why() -> None:
    texts = type("Texts", (Stub,), {"takes_ids": False})
    with (
        serving(texts) as url,
        HttpEngine("texts", url) as engine,
        pytest.raises(AddressFailed, match=r"(?s)refuses to stream .* status 422.*a text"),
    ):
        engine.start()
    with HttpEngine("nobody", "http://127.0.0.1:9") as engine, pytest.raises(AddressFailed, match="nobody"):
        engine.start()
    with pytest.raises(AddressFailed, match="not an address of the form"):
        HttpEngine("tls", "https://127.0.0.1")


def test_a_server_past_its_deadline_is_not_waited_for() -> None:
    trace = (TracedRequest((1,), 1, arrival=60.0),)
    stub = type("Slow", (Stub,), {"asked": []})
    with serving(stub) as url, HttpEngine("slow", url, play_seconds=0.1) as engine:
        engine.start()
        with pytest.raises(AddressFailed, match=r"slow was not done within 0\.1 seconds"):
            engine.play(trace)


# All of it.


@pytest.mark.long
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [(5, 3), (20, 6), (9, 1)]
    lines = [{"arrival": 0.05 * i, "n_input": n, "n_output": m} for i, (n, m) in enumerate(lengths)]
    lines.append({"arrival": 0.01, "n_input": 7, "n_output": 2, "after": 1})
    lengths.append((20 + 6 + 7, 2))
    recorded = tmp_path / "tiny.jsonl"
    recorded.write_text("\n".join(map(json.dumps, lines)))
    small = '{"compile_ahead": false, "max_batch_tokens": 512}'
    words = [
        "--model",
        "demo",
        "--server",
        "--trace",
        str(recorded),
        "--rounds",
        "1",
        "--max-batch-size",
        "4",
    ]
    words += ["--rest", "0", "--arguments", f"orca_jax={small}", "--arguments", f"server={small}"]
    main([*words, "--json", str(tmp_path / "record.json")])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "compare"
    assert line["command"][:2] == ["--model", "demo"]
    assert line["traces"]["tiny.jsonl"]["output_tokens"] == 12
    assert list(line["engines"]) == [OURS, SERVER]
    assert line["engines"][OURS]["flags"]["max_batch_size"] == 4
    sent = line["engines"][SERVER]["flags"]["sent"]
    assert sent["ignore_eos"] is True
    assert sent["temperature"] == 0
    for name in (OURS, SERVER):
        result = line["results"]["tiny.jsonl"][name]
        assert result["missing_tokens"] == 0
        assert len(result["tokens_per_second"]) == 1
        assert 0 < result["normalized_latency_ms"]["p50"][0] <= result["normalized_latency_ms"]["p99"][0]
    assert line["results"]["tiny.jsonl"][SERVER]["same_tokens_as_ours"]["of"] == 4
    record = json.loads((tmp_path / "record.json").read_text())
    assert [play["engine"] for play in record["plays"]] == [OURS, SERVER]
    for play in record["plays"]:
        assert [(request["n_input"], request["n_output"]) for request in play["requests"]] == lengths
        assert all(
            request["n_tokens"] == request["n_output"] and 0 < request["first_token"] <= request["latency"]
            for request in play["requests"]
        )
        last = play["requests"][2]
        assert [request["after"] for request in play["requests"]] == [None, None, None, 1]
        assert play["seconds"] >= last["arrival"] + last["latency"] - 1e-6


def test_an_engine_that_does_not_start_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)bench\.compare: orca_jax ended:.*no_such_argument"):
        main(
            [
                "--model",
                "demo",
                "--equal",
                "1",
                "--requests",
                "0",
                "--arguments",
                'orca_jax={"no_such_argument": 1}',
            ]
        )


def test_an_engine_loads_the_checkpoint(tmp_path: Path) -> None:
    model = gpt_config(vocab_size=50, n_positions=16, hidden_size=8, n_layers=2, n_heads=2, ffn_size=32)
    write_random_checkpoint(tmp_path / "model", model)
    loaded = load_checkpoint(tmp_path / "model", dtype="float32")
    weight = loaded.parameters["layers.1.up.weight"]
    assert weight.shape == (32, 8)
    assert 0.01 < float(weight.std()) < 0.03
    assert float(loaded.parameters["final_norm.scale"].min()) == 1


@pytest.mark.parametrize(
    "name",
    [
        "llama-grouped",
        "gemma2-caps",
        "falcon-new-decoder",
        "bloom-eps",
        "granite-hybrid-dense-rope",
        "granite-hybrid-experts",
        "qwen3-next-grouped",
    ],
)
def test_a_checkpoint_of_any_family(name: str, tmp_path: Path) -> None:
    model = read_config(DATA / "golden" / name)
    write_random_checkpoint(tmp_path / "model", model)
    loaded = load_checkpoint(tmp_path / "model", dtype="float32")
    assert loaded.config == model
    up = next(weight for name, weight in loaded.parameters.items() if name.endswith("up.weight"))
    assert 0.01 < float(up.std()) < 0.03


def test_a_peer_needs_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, '.'); import bench.peers.child"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
