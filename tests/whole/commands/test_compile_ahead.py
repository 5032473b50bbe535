"""Every program that an iteration may need is compiled before a server is ready, and found on disk later."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import jax
import pytest

import orca_jax
from bench.server.server_process import ServerProcess
from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, EngineError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.programs import ToCompile
from orca_jax.execution.worker import Worker
from tests.device.checkpoint.tiny_checkpoint import gpt2_tensors, write_checkpoint
from tests.device.model.golden import DIRECTORY
from tests.log_records import records_of
from tests.whole.conftest import CONFIG
from tests.xla_flags import xla_flags

SOON = 120.0
SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 96, "max_batch_tokens": 32, "seed": 1}
SIZE_FLAGS = ("--max-batch-size=2", "--n-slots=96", "--max-batch-tokens=8")  # few programs
LONGEST = 32  # positions of the model

# Each parameter at least once, and with them every program there is.
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 1.0},
    {"temperature": 1.0, "top_k": 3, "presence_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {97: 5.0}},
    {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": True},
    {"temperature": 0.0, "min_tokens": 2, "stop": ("a",)},
    {"temperature": 0.0, "stop_token_ids": (98,)},
    {"temperature": 1.0, "allowed_token_ids": (97, 98, 99)},
    {"temperature": 0.0, "bad_words": ("ab",)},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "prompt_logprobs": 2},
    {"temperature": 1.0, "guided_json": '{"type": "object"}'},
    {"temperature": 1.0, "guided_json_object": True},
    {"temperature": 0.0, "guided_regex": "[a-z]+"},
    {"temperature": 1.0, "top_p": 0.9, "guided_choice": ("yes", "no")},
    {"temperature": 1.0, "guided_grammar": 'start: "a"+'},
    {"temperature": 1.0, "n": 2, "ignore_eos": False},
]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """A model that two stages can share."""
    config = CONFIG | {"n_layer": 2, "n_positions": LONGEST}
    directory = write_checkpoint(tmp_path_factory.mktemp("two"), config, gpt2_tensors(config))
    (directory / "tokenizer.json").write_bytes((tiny_directory / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder for compiled programs; afterwards the test run's folder is used again."""
    yield tmp_path / "programs"
    keep_compiled_programs(os.environ["JAX_COMPILATION_CACHE_DIR"])


def ask_everything(llm: LLM) -> None:
    """Submit prompts of every length with every parameter, together in mixed batches, and some alone."""
    prompts, sampling = list[list[int]](), list[SamplingParams]()
    for length in range(1, LONGEST):
        for i in (length, length + 8) if length < 9 else (length,):
            asked = {"ignore_eos": True, **ASKED[i % len(ASKED)]}
            prompts.append([97 + j % 7 for j in range(length)])
            sampling.append(SamplingParams(max_tokens=min(3, LONGEST - length), **asked))
    assert len(llm.generate(prompts, sampling)) >= len(prompts)
    for asked in ASKED:
        for length in (1, 20):
            llm.generate([[97] * length], SamplingParams(max_tokens=2, **{"ignore_eos": True, **asked}))
    for length in range(1, LONGEST):
        llm.generate([[97] * length], SamplingParams(max_tokens=1, prompt_logprobs=1))


def test_what_is_asked_uses_every_parameter() -> None:
    asked = {name for one in ASKED for name in one} | {"max_tokens", "return_routed_experts"}
    asked |= {"speculative", "prediction"}  # which change nothing without a drafter
    assert asked == {field.name for field in fields(SamplingParams)}


@pytest.mark.long
def test_experts_that_were_chosen_compile_nothing_after_ready() -> None:
    directory = DIRECTORY / "mixtral-grouped"
    with LLM(directory, compile_ahead=True, on_compile="error", **SIZES) as llm:
        ready = llm.compiles
        for length in (1, 5, LONGEST):
            params = SamplingParams(max_tokens=2, return_routed_experts=True)
            (result,) = llm.generate([list(range(length))], params)
            assert result.routed_experts is not None and len(result.routed_experts) >= length
        assert llm.compiles == ready


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"deterministic": True}, marks=pytest.mark.long),
        pytest.param({"overlap": False, "attention": "static"}, marks=pytest.mark.long),
        pytest.param({"pipeline_parallel": 2, "tensor_parallel": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_after_ready_nothing_is_compiled(two_layers: Path, how: dict[str, Any]) -> None:
    calls: list[tuple[int, int, str]] = []
    with LLM(
        two_layers,
        compile_ahead=True,
        on_compile="error",
        on_program=lambda *progress: calls.append(progress),
        **SIZES,
        **how,
    ) as llm:
        ready = llm.compiles
        assert calls[-1][0] == calls[-1][1] > 12
        ask_everything(llm)
        assert llm.compiles == ready


@pytest.mark.parametrize(
    "left_out", ["forward pass, 24 tokens", "full sampler, 4 rows", "a prompt's hidden states, 16 tokens"]
)
@pytest.mark.long
def test_without_any_one_program_it_shows(
    two_layers: Path, left_out: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this the test above would prove nothing; covers both values of --on-compile."""
    programs = Worker.programs
    names = list[str]()

    def fewer(self: Worker, *sizes: Any) -> Iterator[ToCompile]:
        for program in programs(self, *sizes):
            names.append(program.name)
            if program.name != left_out:
                yield program

    monkeypatch.setattr(Worker, "programs", fewer)
    jax.clear_caches()  # JAX keeps what another LLM of this process compiled of a function of ours
    with LLM(two_layers, compile_ahead=True, **SIZES) as llm:
        assert left_out in names
        ready = llm.compiles.programs
        ask_everything(llm)
        assert llm.compiles.programs == ready + 1
    (warning,) = records_of(caplog, "orca_jax.compile")
    assert "compiled after ready" in warning.getMessage()
    jax.clear_caches()
    with LLM(two_layers, compile_ahead=True, on_compile="error", **SIZES) as llm:
        with pytest.raises(EngineError, match="on_compile=error forbids"):
            ask_everything(llm)
        assert llm.service.failure is not None


def test_error_without_compiling_ahead_is_refused(two_layers: Path) -> None:
    with pytest.raises(ConfigError, match="set compile_ahead, or leave on_compile out"):
        LLM(two_layers, on_compile="error")
    with pytest.raises(ConfigError, match="on_compile is 'never'"):
        LLM(two_layers, on_compile="never")  # pyright: ignore[reportArgumentType]


def test_a_folder_that_cannot_be_written_to_is_refused(two_layers: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile_cache is .*file/programs'"):
        LLM(two_layers, compile_cache=tmp_path / "file" / "programs")


@pytest.mark.parametrize(
    "split",
    [{}, {"pipeline_parallel": 2, "tensor_parallel": 2}],
    ids=str,
)
@pytest.mark.long
def test_what_was_compiled_without_weights_is_what_a_server_needs(
    two_layers: Path, folder: Path, split: dict[str, int]
) -> None:
    sizes: dict[str, Any] = {name: value for name, value in SIZES.items() if name != "seed"} | split
    jax.clear_caches()  # what this process knows already is not written
    compiled = orca_jax.compile_model(two_layers, compile_cache=folder, **sizes)
    assert compiled.folder == folder and compiled.from_disk < compiled.programs and compiled.n_slots == 96
    files = set(folder.glob("*-cache"))
    assert len(files) >= compiled.programs - compiled.from_disk - 1
    jax.clear_caches()
    again = orca_jax.compile_model(two_layers, compile_cache=folder, **sizes)
    assert again.programs == compiled.programs and set(folder.glob("*-cache")) == files
    jax.clear_caches()
    with LLM(two_layers, compile_ahead=True, compile_cache=folder, **sizes) as llm:
        assert llm.compiles.programs == llm.compiles.from_disk > compiled.programs / 2
        assert set(folder.glob("*-cache")) == files
        llm.generate(["abc"], SamplingParams(max_tokens=2))


def compiles(server: ServerProcess) -> dict[str, float]:
    """The metrics of compilation."""
    text = httpx2.get(server.url + "/metrics", timeout=SOON).text
    return {
        name: float(value)
        for name, value in re.findall(r"^(orca_compile\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        if not name.endswith("_created")
    }


@pytest.mark.parametrize(
    "stages",
    [(), pytest.param(("--worker-processes", "--pipeline-parallel", "2"), marks=pytest.mark.long)],
    ids=["here", "processes"],
)
def test_orca_compile_and_then_orca_serve(two_layers: Path, tmp_path: Path, stages: tuple[str, ...]) -> None:
    flags = (str(two_layers), *SIZE_FLAGS, *stages, "--compile-cache", str(tmp_path / "programs"))
    plain = {"XLA_FLAGS": xla_flags()}  # JAX finds programs by XLA's flags too: those of a worker process
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", "compile", *flags],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=True,
        env=os.environ | plain,
    )
    assert done.stdout.strip() == str(tmp_path / "programs")
    n_programs, n_found = map(int, re.findall(r"(\d+) programs .* \((\d+) were on disk\)", done.stderr)[0])
    assert n_programs > n_found
    files = set((tmp_path / "programs").rglob("*-cache"))
    inside = {path.relative_to(tmp_path / "programs").parent.as_posix() for path in files}
    assert inside - {"."} == ({"stage-1-of-2", "stage-2-of-2"} if stages else set())
    with ServerProcess(flags, compile_ahead=True, variables=plain) as server:
        server.wait_until_ready()
        ready = compiles(server)
        if not stages:
            assert f"{n_programs} programs compiled in " in server.stderr()
            assert ready["orca_compiles_total"] >= n_programs - 1
            assert ready["orca_compiles_from_disk_total"] == ready["orca_compiles_total"]
        for i, asked in enumerate(({}, {"logprobs": 2, "temperature": 0}, {"top_p": 0.5, "echo": True})):
            body = {"model": two_layers.name, "prompt": [97] * (5 + 10 * i), "max_tokens": 3, **asked}
            answer = httpx2.post(server.url + "/v1/completions", json=body, timeout=SOON)
            assert answer.status_code == 200, answer.text
        assert compiles(server) == ready
    more = set((tmp_path / "programs").rglob("*-cache")) - files
    # What is the same for both stages, and so is compiled for them at once: small programs.
    same = {"jit_no_tokens", "jit_copy_blocks"} if stages else set[str]()
    assert {path.name.partition("-")[0] for path in more} <= same
