"""`orca plan` from its command line: tables, JSON and errors. XLA is not involved."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import install_line
from orca_jax.families.hf_config import hf_config_of
from orca_jax.families.presets import PRESETS
from orca_jax.workers import ask_xla
from orca_jax.workers.ask_xla import NoAnswer
from server import cli
from server.commands import plan
from server.commands.plan import seconds_of

PAPER = ("gpt3-175b", "--device", "a100-40gb", "--pipeline-parallel", "2", "--tensor-parallel", "8")


def orca_plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """stdout, parsed as one JSON object."""
    return json.loads(capsys.readouterr().out)


def test_the_papers_175b_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert orca_plan(*PAPER, "--no-compile", "--latency-budget", "40ms") == 0
    text = capsys.readouterr().out
    assert "174.60 billion parameters, bfloat16" in text
    assert "2 stages of 48 layers, 8 devices each: a100-40gb with 40.0 GiB, 36.0 GiB of it usable" in text
    assert "temporaries by arithmetic (XLA was not run)" in text
    assert "20.45" in text and "20.40" in text  # GiB of weights: 175 billion x 2 bytes over 16 devices
    assert "for a budget of 40 ms: --max-batch-size" in text


def test_a_directory_needs_config_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = hf_config_of(PRESETS["llama-3.1-8b"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    figures: list[dict[str, Any]] = []
    for model in (str(tmp_path), "llama-3.1-8b"):
        assert orca_plan(model, "--device", "h200", "--no-compile", "--json") == 0
        figures.append(answer(capsys) | {"model": None})
    assert figures[0] == figures[1]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("name", "n_stages", "tensor", "weights"),
    [("llama-3.1-70b", 1, 4, 70_553_706_496 * 2), ("llama-3.1-405b", 2, 8, 405_853_388_800 * 2)],
)
def test_large_llamas_fit_on_h200s(
    name: str, n_stages: int, tensor: int, weights: int, capsys: pytest.CaptureFixture[str]
) -> None:
    split = ("--pipeline-parallel", str(n_stages), "--tensor-parallel", str(tensor))
    assert orca_plan(name, "--device", "h200", *split, "--no-compile", "--json") == 0
    report = answer(capsys)
    assert report["fits"]
    per_device = weights / n_stages / tensor
    assert all(stage["weights"] == pytest.approx(per_device, rel=1e-3) for stage in report["stages"])
    slot = 2 * PRESETS[name].n_layers // n_stages * 8 // tensor * 128 * 2  # 8 K/V heads of 128, bfloat16
    assert {stage["slot"] for stage in report["stages"]} == {slot}
    # One token reads all weights but its embedding's table, and 65,536 keys and values.
    least = (n_stages * per_device + 65_536 * n_stages * slot) / 4.8e12
    assert report["floors"][0]["seconds"] == pytest.approx(least, rel=0.03)


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert orca_plan(*PAPER, "--no-compile", "--json", "--context", "256", "--latency-budget", "0.04") == 0
    report = answer(capsys)
    assert report["fits"] and report["problems"] == [] and report["hint"] is None
    assert (report["temporaries_source"], report["why_not_compiled"]) == ("arithmetic", "XLA was not run")
    assert [stage["layers"] for stage in report["stages"]] == [[1, 48], [49, 96]]
    assert report["device"]["budget"] == int(0.9 * (40 << 30))
    for stage in report["stages"]:
        fixed = stage["weights"] + stage["tables"] + stage["temporaries"]
        assert 0 <= report["device"]["budget"] - fixed - stage["slots"] * stage["slot"] < stage["slot"]
    assert report["n_slots"] == min(stage["slots"] for stage in report["stages"])
    assert {floor["phase"] for floor in report["floors"]} == {"decode", "prefill"}
    assert report["forward_programs"] == 16 + 4  # decode of 1, 8, 16 and 32 rows has programs of its own
    recommended = report["recommendation"]
    assert recommended["budget"] == 0.04 and recommended["seconds"] <= 0.04
    assert recommended["max_bs"] > 0


def test_a_server_of_one_role(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 8B on an H200: 2 x 32 layers x 8 heads x 128 elements of 2 bytes a token."""
    asked = ("llama-3.1-8b", "--device", "h200", "--no-compile", "--context", "4096", "--json")
    pools: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for role in ("prefill", "decode"):
        assert orca_plan(*asked, "--role", role, "--output-tokens", "100", "--max-batch-size", "64") == 0
        report = answer(capsys)
        pool = pools[role] = report["pool"]
        assert (pool["role"], pool["context"], pool["n_output"]) == (role, 4096, 100)
        assert pool["prompt_bytes"] == 4096 * 2 * 32 * 8 * 128 * 2
        assert pool["transfer_seconds"] == pytest.approx(pool["prompt_bytes"] / 50e9)
        n_prompts = pool["host_bytes"] / pool["prompt_bytes"]
        assert n_prompts >= pool["requests_per_second"] * (1 if role == "prefill" else 2)
    floors = {(floor["phase"], floor["batch_size"]): floor["interval"] for floor in report["floors"]}
    begun, ended = 1 / floors["prefill", 1], 64 / floors["decode", 64] / 100
    assert pools["prefill"]["requests_per_second"] == pytest.approx(begun)
    assert pools["decode"]["requests_per_second"] == pytest.approx(ended)
    assert pools["prefill"]["others_each"] == pytest.approx(begun / ended)
    assert pools["decode"]["others_each"] == pytest.approx(ended / begun)
    assert orca_plan(*asked[:-1], "--role", "decode", "--latency-budget", "20ms") == 0
    assert "--role decode, at the floors" in capsys.readouterr().out


@pytest.mark.parametrize("context", [8, 1024])
def test_a_hybrid_s_prompts_travel_with_their_state(context: int, capsys: pytest.CaptureFixture[str]) -> None:
    """LFM2 8B: 6 layers of 8 heads of 64 elements attend, and 18 keep 2 inputs of 2,048 channels."""
    keys, state = context * 6 * 2 * 8 * 64 * 2, 18 * 2 * 2048 * 2
    assert (keys < state) == (context == 8)
    asked = ("lfm2-8b-a1b", "--device", "h200", "--no-compile", "--context", str(context))
    assert orca_plan(*asked, "--json", "--role", "prefill") == 0
    pool = answer(capsys)["pool"]
    assert pool["prompt_bytes"] == keys + state
    n_prompts, rest = divmod(pool["host_bytes"], 2 * max(keys, state))
    assert not rest and n_prompts >= pool["requests_per_second"], "half of the tier may be states"
    assert orca_plan(*asked, "--role", "prefill") == 0
    assert "A prompt's keys and values, and its state: " in capsys.readouterr().out


def test_xlas_figures_take_precedence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[Any] = []

    def ask(question: Any, seconds: float) -> tuple[int, ...]:
        questions.append((question, seconds))
        return 3 << 30, 4 << 30

    monkeypatch.setattr(plan, "ask_memory", ask)
    assert orca_plan(*PAPER, "--json", "--compile-timeout", "7") == 0
    report = answer(capsys)
    assert (report["temporaries_source"], report["why_not_compiled"]) == ("compiled", None)
    assert [stage["temporaries"] for stage in report["stages"]] == [3 << 30, 4 << 30]
    ((question, seconds),) = questions
    assert (question.device, question.n_rows, question.dtype, seconds) == ("a100-40gb", 96, "bfloat16", 7.0)
    assert question.serving.n_slots > 40_000


def test_without_a_compiler_it_says_so_and_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask_xla, "find_spec", lambda name: None)
    assert orca_plan("gpt2", "--device", "h200", "--json") == 0
    report = answer(capsys)
    assert report["temporaries_source"] == "arithmetic"
    assert report["why_not_compiled"].startswith(
        f"no CUDA plugin for JAX is installed: {install_line('cuda')}"
    )


def test_a_compiler_that_fails_or_hangs_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_xla, "_MODULE", "json.tool")  # it exits with 0 and prints something else
    with pytest.raises(NoAnswer, match="ended with status 0"):
        ask_xla.ask_rates("float32")
    monkeypatch.setattr(ask_xla, "_MODULE", "no.such.module")
    with pytest.raises(NoAnswer, match=r"ended with status 1: .*no"):
        ask_xla.ask_rates("float32")
    monkeypatch.setattr(ask_xla, "_MODULE", "timeit")
    monkeypatch.setattr(ask_xla, "_MEASURE_SECONDS", 0.01)
    with pytest.raises(NoAnswer, match=r"did not finish: no answer within 0\.01 seconds"):
        ask_xla.ask_rates("float32")


def test_a_model_that_does_not_fit_gives_status_1_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert orca_plan("gpt3-175b", "--device", "a100-40gb", "--tensor-parallel", "8") == 1
    text = capsys.readouterr().out
    assert "does not fit: stage 1 needs 40.71 GiB of weights" in text
    assert text.splitlines()[-1] == "use --pipeline-parallel 2"
    assert orca_plan("gpt3-175b", "--device", "a100-40gb", "--tensor-parallel", "8", "--json") == 1
    report = answer(capsys)
    assert not report["fits"] and report["n_slots"] == 0 and report["hint"] == "use --pipeline-parallel 2"


def test_measured_figures_replace_the_data_sheets(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--memory", "16", "--bandwidth", "30", "--matrix-rate", "0.2", "--no-compile", "--json")
    assert orca_plan("demo", "--device", "cpu", *flags) == 0
    report = answer(capsys)
    assert report["dtype"] == "float32"
    assert report["device"]["memory"] == report["device"]["budget"] == 16 << 30
    assert (report["device"]["bandwidth"], report["device"]["matrix_rate"]) == (30e9, 0.2e12)
    first = report["floors"][0]
    # One row of the demo model at 256 tokens: its weights without the position table, and 256 slots.
    n_bytes = 4 * (2048 * 256 + 4 * (12 * 256**2 + 13 * 256)) + 256 * 2 * 4 * 256 * 4
    assert first["seconds"] == pytest.approx(n_bytes / 30e9, rel=0.02)


def test_without_a_model_the_demo_model_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert orca_plan("--device", "h100", "--no-compile", "--json") == 0
    named = answer(capsys)
    assert orca_plan("demo", "--device", "h100", "--no-compile", "--json") == 0
    assert {**answer(capsys), "model": "the demo model"} == named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("gpt2", "--device", "v100"),
            "device is 'v100'; it must be one of a100-40gb, a100-80gb, l40s, h100, h200, b200",
        ),
        (("gpt2",), "the following arguments are required: --device"),
        (("gpt2", "--device", "h200", "--tensor-parallel", "5"), "n_heads 12 is not a multiple of it"),
        (("gpt2", "--device", "h200", "--max-batch-size", "4097"), "max_batch_size is 4097"),
        (
            ("gpt2", "--device", "h200", "--max-batch-size", "64", "--max-batch-tokens", "32"),
            "max_batch_size 64 is above max_batch_tokens 32",
        ),
        (("gpt2", "--device", "h200", "--memory-fraction", "1.5"), "memory_fraction is 1.5"),
        (("gpt2", "--device", "h200", "--context", "1025"), "context is 1025"),
        (("gpt2", "--device", "h200", "--latency-budget", "soon"), "latency_budget is 'soon'"),
        (
            ("gpt2", "--device", "h200", "--no-compile", "--role", "decode", "--output-tokens", "0"),
            "output_tokens is 0; it must be at least 1",
        ),
        (
            ("t5-small", "--device", "h200", "--no-compile", "--role", "prefill"),
            "prompts of a model with an encoder do not travel",
        ),
        (("gpt2", "--device", "h200", "--bandwidth", "-1"), "bandwidth is -1; it must be a number above 0"),
        (("no/such/place", "--device", "h200"), "there is no directory no/such/place"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert orca_plan(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("0.05s", 0.05), ("0.05", 0.05), ("2", 2.0), ("1e1ms", 0.01)]
)
def test_times_may_have_units(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)
