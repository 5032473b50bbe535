"""Flags by the names that vLLM, SGLang, text-generation-inference and llama.cpp give them."""

import argparse
import re
from pathlib import Path

import pytest

from server import cli
from server.errors import UsageError
from server.parser import parser, shown_flags
from server.settings import foreign_flags
from server.settings.foreign_flags import ADVICE, HINTS, MODEL, SAME, SWITCHES, TRANSLATED
from server.settings.serve_settings import serve_settings

PARSER = parser()  # making it takes longer than all that is parsed
COMMANDS = PARSER.commands
NAMES = [*SAME, *SWITCHES, *TRANSLATED, *HINTS, *ADVICE]
OURS = {flag for command in COMMANDS.values() for flag in shown_flags(command)}


def parsed(*words: str) -> argparse.Namespace:
    return PARSER.parse_args(words)


def value_for(flag: str) -> str:
    """A value that our flag takes."""
    command = next(each for each in COMMANDS.values() if flag in shown_flags(each))
    action = next(each for each in command._actions if flag in each.option_strings)
    return {"N": "2", "X": "0.5"}.get(str(action.metavar), "2")


def test_vllms_usual_line() -> None:
    args = parsed(
        *("serve", "--model", "m", "--tensor-parallel-size", "2", "--pipeline-parallel-size=3"),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--gpu-memory-utilization", "0.8"),
        *("--served-model-name", "name", "--enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json", "--reasoning-parser", "qwen3"),
        *("--trust-remote-code", "--disable-log-requests", "--host", "::1", "--port", "1"),
    )
    settings = serve_settings(args, {})
    engine, endpoint = settings.engine, settings.endpoint
    assert engine.model == "m" and endpoint.served_model_name == "name"
    assert (engine.tensor_parallel, engine.pipeline_parallel) == (2, 3)
    assert (engine.max_batch_size, engine.max_batch_tokens, engine.memory_fraction) == (64, 4096, 0.8)
    assert (engine.prefix_caching, engine.chunked_prefill) == (True, False)
    assert (endpoint.tool_format, endpoint.reasoning_format) == ("llama3", "think")
    assert [hint.split()[0] for hint in args.hints] == [
        *("--enable-auto-tool-choice", "--trust-remote-code", "--disable-log-requests"),
    ]


def test_llama_servers_usual_line() -> None:
    args = parsed("serve", "-m", "m", "-np", "4", "-ngl", "99", "-t", "8", "-a", "name", "--jinja")
    assert (args.model, args.max_batch_size, args.served_model_name) == ("m", 4, "name")
    assert [hint.split()[0] for hint in args.hints] == ["-ngl", "-t", "--jinja"]


def test_sglangs_usual_line() -> None:
    args = parsed(
        *("serve", "--model-path", "m", "--tp", "2", "--dp", "2", "--mem-fraction-static", "0.5"),
        *("--max-running-requests", "8", "--disable-radix-cache", "--schedule-policy", "lpm"),
    )
    assert (args.model, args.tensor_parallel, args.replicas, args.memory_fraction) == ("m", 2, 2, 0.5)
    assert (args.max_batch_size, args.prefix_caching) == (8, False)
    assert args.scheduling_policy == "longest-prefix"


def test_llama_clis_usual_line() -> None:
    args = parsed("generate", "-m", "m", "-n", "5", "--temp", "0", "-s", "7", "Once upon a time")
    assert (args.model, args.max_tokens, args.temperature, args.seed) == ("m", 5, 0.0, 7)
    assert args.prompt == ["Once upon a time"]


@pytest.mark.parametrize("name", sorted(SAME))
def test_the_same_meaning_is_taken(name: str) -> None:
    ours = SAME[name]
    taken = [each for each, command in COMMANDS.items() if name in command._option_string_actions]
    assert taken
    for each in taken:
        required = {
            "plan": ["--device", "h100"],
            "replay": ["FILE"],
            "diff": ["--against", "a:b"],
            "worker": ["--stage", "1", "--of", "1", "--listen", "a:1"],
        }.get(each, [])
        if ours == MODEL:
            assert parsed(each, *required, name, "m").model == "m"
        else:
            value = value_for(ours)
            by_ours = vars(parsed(each, *required, ours, value))
            assert vars(parsed(each, *required, name, value)) == by_ours
            assert vars(parsed(each, *required, f"{name}={value}")) == by_ours


def test_the_tables_are_about_flags_that_exist() -> None:
    targets = {ours for ours, _ in (*SWITCHES.values(), *TRANSLATED.values())}
    assert {*SAME.values(), *targets} - {MODEL} <= OURS
    for theirs, (ours, values) in TRANSLATED.items():
        for value in values:
            assert vars(parsed("serve", theirs, value)) == vars(parsed("serve", ours, values[value]))
    texts = " ".join((*ADVICE.values(), *(text for _, text in HINTS.values())))
    of_others = {"--help", "--revision", "--xla"}  # argparse's, the hub's and XLA's
    assert set(re.findall(r"--[a-z-]+", texts)) - of_others <= OURS
    assert len(NAMES) == len(set(NAMES))


def test_no_name_hides_one_of_ours() -> None:
    """In each command a name is either our flag or a foreign one, and `--help` shows only ours."""
    for command in COMMANDS.values():
        hidden = set(command._option_string_actions) - shown_flags(command)
        assert hidden <= set(NAMES)
    text = COMMANDS["serve"].format_help()
    assert "--tensor-parallel-size" not in text and "--trust-remote-code" not in text


@pytest.mark.parametrize("name", sorted(ADVICE))
def test_a_flag_without_an_equal_is_explained(name: str) -> None:
    command = "serve" if name not in shown_flags(COMMANDS["serve"]) else "generate"
    for words in ([name], [name, "1"], [f"{name}=1"]):
        with pytest.raises(UsageError) as mistake:
            parsed(command, *words)
        assert str(mistake.value) == f"{name} is not a flag of `orca {command}`: {ADVICE[name]}"


def test_a_hint_is_printed_once_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "gpt2", "--device", "h100", "--no-compile"]
    assert cli.main([*plan, "--trust-remote-code", "-t", "3"]) == 0
    with_hints = capsys.readouterr()
    assert cli.main(plan) == 0
    assert capsys.readouterr().out == with_hints.out
    first, second = with_hints.err.splitlines()
    assert first == "orca: --trust-remote-code has no effect: no code of a checkpoint is ever run"
    assert second.startswith("orca: -t has no effect: there are as many threads as CPUs")


def test_a_secret_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--api-key", "s3cret-s3cret"], ["--api-key=s3cret-s3cret"]):
        assert cli.main(["serve", *words]) == 2
        assert "s3cret" not in capsys.readouterr().err


def test_another_engine_s_value_without_an_equal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--tool-call-parser", "pythonic"]) == 2
    assert "--tool-call-parser pythonic: here the flag is --tool-format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tensor-parallel-size: 2", "'tensor-parallel-size' is not a setting; here it is tensor_parallel"),
        ("enable_prefix_caching: true", "here it is prefix_caching"),
        ("max-model-len: 4096", "'max-model-len' is not a setting: a request may have"),
        ("trust-remote-code: true", "is not a setting: no code of a checkpoint is ever run"),
        ("prot: 1", "'prot' is not a setting; did you mean port?"),
    ],
)
def test_a_settings_file_of_vllms(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(UsageError) as mistake:
        serve_settings(parsed("serve", "--config", str(file)), {})
    assert words in str(mistake.value)


def test_foreign_names_exist_in_other_engines() -> None:
    assert foreign_flags.about("no_such_flag") == ""
