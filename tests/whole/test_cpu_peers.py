"""The comparison with other engines: what goes over the pipe, and what is said of the rounds."""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from bench.cpu_peers import OURS, EngineEnded, EngineProcess, Rates, play_in_turn, ratio, table, traces
from bench.peers.checkpoint import write_random_gpt2
from orca_jax.config import ModelConfig
from orca_jax.sharding.checkpoint import load_checkpoint

ECHO = """
from bench.peers.child import serve

def start(flags):
    print("a library's own words are no answer")
    def play(prompts, n_outputs):
        assert len(prompts) == len(n_outputs)
        return sum(n_outputs) - flags["missing"]
    return play, {"versions": "1", "flags": flags}

serve(start)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that is an engine of no model; its name."""
    (tmp_path / "echo_engine.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_engine"


def test_rounds_go_in_turn_and_the_first_does_not_count(echo: str) -> None:
    played = traces([1, 2], vocab_size=100)
    with EngineProcess(OURS, sys.executable, echo) as ours, EngineProcess("b", sys.executable, echo) as other:
        for engine in (ours, other):
            engine.start({"missing": 0})
            assert engine.about == {"versions": "1", "flags": {"missing": 0}}
        found = play_in_turn([ours, other], played, 3, Progress(disable=True))
    assert list(found) == [OURS, "b"]
    for rates in found.values():
        assert list(rates.by_trace) == ["paper", "equal, 1", "equal, 2"]
        assert all(len(one) == 3 and min(one) > 0 for one in rates.by_trace.values())


def test_an_engine_that_gives_too_few_tokens_or_ends_is_found_out(echo: str) -> None:
    trace = traces([1], vocab_size=100)["equal, 1"]
    with EngineProcess("short", sys.executable, echo) as engine:
        engine.start({"missing": 1})
        with pytest.raises(AssertionError, match="short gave 31 tokens, not 32"):
            engine.play(trace)
    with EngineProcess("gone", sys.executable, echo) as engine:
        engine.start({})
        with pytest.raises(EngineEnded, match="KeyError: 'missing'"):
            engine.play(trace)


def test_the_ratio_is_of_each_round() -> None:
    assert ratio([100.0, 50.0, 90.0], [50.0, 25.0, 100.0]) == 2.0
    found = {OURS: Rates({"paper": [100.0, 50.0]}), "b": Rates({"paper": [50.0, 25.0]})}
    console = Console(width=140)
    with console.capture() as said:
        console.print(table(found))
    assert "37.5 (25.0 to 50.0), 2.00" in said.get()


def test_the_checkpoint_is_one_that_an_engine_loads(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=50, n_positions=16, hidden_size=8, n_layers=2, n_heads=2, ffn_size=32)
    write_random_gpt2(tmp_path / "model", model)
    loaded = load_checkpoint(tmp_path / "model", dtype="float32")
    weight = loaded.parameters["layers.1.up.weight"]
    assert weight.shape == (32, 8)
    assert 0.01 < float(weight.std()) < 0.03
    assert float(loaded.parameters["final_norm.scale"].min()) == 1
