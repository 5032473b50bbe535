"""`orca generate`: text to the terminal, a file to a file, and one line for every mistake."""

import inspect
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import orca_jax
from orca_jax import LLM, SamplingParams
from orca_jax.config import EngineConfig
from orca_jax.errors import EngineError
from orca_jax.options import options_of
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.prepared_params import OutputRules
from server import cli
from server.commands import jsonl
from server.commands.answer_file import AnswerStream
from server.commands.generating import logprob_table
from server.commands.request_lines import MAX_LINE_BYTES
from server.settings.flags import GENERATE_OPTIONS
from server.settings.sampling_flags import sampling_params
from tests.host.engines import LETTERS
from tests.places import ROOT
from tests.whole.lent import Lent

SOON = 300  # seconds that nothing here takes


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The command line


def test_the_flags_are_those_of_the_dataclasses() -> None:
    parameters = inspect.signature(LLM).parameters
    engine = {option.name for option in options_of(EngineConfig)}
    for option in (each for each in GENERATE_OPTIONS if each.name in engine):
        assert parameters[option.name].default == option.default, option.name
    assert FLAGS.keys() | BEAM_FLAGS.keys() == {field.name for field in fields(SamplingParams)} - {
        "speculative"
    }


# A flag or two for each field, and what it must become.
FLAGS: dict[str, tuple[list[str], Any]] = {
    "n": (["--n", "3"], 3),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "5"], 5),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.2"], 1.2),
    "frequency_penalty": (["--frequency-penalty", "-0.5"], -0.5),
    "presence_penalty": (["--presence-penalty", "2"], 2.0),
    "logit_bias": (["--logit-bias", "5=-100", "--logit-bias", "7=1.5"], {5: -100.0, 7: 1.5}),
    "seed": (["--seed", "-3"], -3),
    "ignore_eos": (["--ignore-eos"], True),
    "stop": (["--stop", "a,b", "--stop", "none"], ("a,b", "none")),
    "stop_token_ids": (["--stop-token-ids", "1,2", "--stop-token-ids", "3"], (1, 2, 3)),
    "allowed_token_ids": (["--allowed-token-ids", "0", "--allowed-token-ids", "4,9"], (0, 4, 9)),
    "bad_words": (["--bad-words", "x", "--bad-words", "y z"], ("x", "y z")),
    "logprobs": (["--logprobs", "0"], 0),
    "prompt_logprobs": (["--prompt-logprobs", "20"], 20),
    "guided_json": (["--guided-json", '{"type": "object"}'], '{"type": "object"}'),
    "guided_json_object": (["--guided-json-object"], True),
    "guided_regex": (["--guided-regex", "none|@[a-z]+"], "none|@[a-z]+"),
    "guided_choice": (["--guided-choice", "yes", "--guided-choice", "no,never"], ("yes", "no,never")),
    "guided_grammar": (["--guided-grammar", 'start: "a"'], 'start: "a"'),
    "return_routed_experts": (["--return-routed-experts"], True),
    "prediction": (["--prediction", "a, b"], "a, b"),
}


# Those of a beam search, which needs the first.
BEAM_FLAGS: dict[str, tuple[list[str], Any]] = {
    "use_beam_search": (["--use-beam-search"], True),
    "best_of": (["--best-of", "3"], 3),
    "length_penalty": (["--length-penalty", "0.5"], 0.5),
    "early_stopping": (["--early-stopping", "never"], "never"),
}


def params(*flags: str) -> SamplingParams:
    return sampling_params(cli.parser().parse_args(["generate", "x", *flags]))


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_sets_its_field(name: str) -> None:
    flags, value = FLAGS[name]
    assert params(*flags, "--speculative", "ngram") == replace(params(), **{name: value})
    assert getattr(params(), name) != value, "or the flag could have been ignored"


def test_each_flag_of_a_beam_search_sets_its_field() -> None:
    flags = [flag for own, _ in BEAM_FLAGS.values() for flag in own]
    wanted = {name: value for name, (_, value) in BEAM_FLAGS.items()}
    # Without the default temperature: such a search draws nothing.
    assert params(*flags) == SamplingParams(max_tokens=128, **wanted)


def test_defaults_equal_the_api_s_except_for_two() -> None:
    assert params() == SamplingParams(max_tokens=128, temperature=0.8)


def test_a_models_defaults_apply_to_absent_flags() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    for flags, expected in (
        ([], SamplingParams(max_tokens=128, **recommended)),
        (["--top-k", "0"], SamplingParams(max_tokens=128, temperature=0.6, top_p=0.9)),
        (["--temperature", "0.8"], SamplingParams(max_tokens=128, temperature=0.8, top_p=0.9, top_k=20)),
    ):
        args = cli.parser().parse_args(["generate", "x", *flags])
        assert sampling_params(args, recommended) == expected


@pytest.mark.parametrize("name", ["guided_json", "guided_grammar"])
def test_a_schema_and_a_grammar_can_come_from_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, value = FLAGS[name]
    (tmp_path / "file").write_text(value)
    assert getattr(params(flags[0], f"@{tmp_path}/file"), name) == value
    for place, message in (("none", "No such file"), ("", "Is a directory")):
        assert cli.main(["generate", "x", flags[0], f"@{tmp_path}/{place}"]) == 2
        stderr = capsys.readouterr().err
        assert f"argument {flags[0]}: {tmp_path}" in stderr and message in stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"orca {orca_jax.__version__}\n"
    assert cli.main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in (
        *(flag.name for flag in GENERATE_OPTIONS),
        *(field.name for field in fields(SamplingParams)),
    ):
        assert "--" + flag.replace("_", "-") in out
    assert "(default: 128)" in out
    (generate,) = (
        action.choices["generate"] for action in cli.parser()._actions if isinstance(action.choices, dict)
    )
    assert [action.option_strings for action in generate._actions if not action.help] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["swim"], "there is no command 'swim'; it is one of generate, chat, serve"),
        (["generate", "--no-such-flag", "x"], "--no-such-flag is not a flag of `orca generate`"),
        (["generate", "x", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0; it must be a whole number from 1"),
        (
            ["generate", "x", "--temperature", "nan"],
            "temperature is nan; it must be 0, or a number from 1e-10 to 100",
        ),
        (["generate", "x", "--stop", ""], "stop has ''; each of its texts must have 1 to"),
        (["generate", "x", "--n", "0"], "n is 0; it must be a whole number from 1 to 65536"),
        (["generate", "x", "--min-tokens", "200"], "min_tokens is 200; it must be at most max_tokens"),
        (["generate", "x", "--min-p", "2"], "min_p is 2.0; it must be a number from 0 to 1"),
        (["generate", "x", "--logit-bias", "5"], "argument --logit-bias: '5' is not of the form ID=VALUE"),
        (["generate", "x", "--logit-bias", "a=5"], "'a=5' is not of the form ID=VALUE"),
        (["generate", "x", "--logit-bias", "5=nan"], "logit_bias has 5: nan"),
        (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "has token id 5 twice"),
        (["generate", "x", "--stop-token-ids", "1,,2"], "argument --stop-token-ids: '1,,2' is not a list of"),
        (["generate", "x", "--allowed-token-ids", ""], "argument --allowed-token-ids: '' is not a list of"),
        (["generate", "x", "--logprobs", "21"], "logprobs is 21; it must be a whole number from 0 to 20"),
        (["generate", "x", "--guided-json", "{"], "guided_json is not a JSON schema"),
        (["generate", "x", "--guided-choice", ""], "guided_choice has ''"),
        (
            ["generate", "x", "--guided-regex", "a", "--guided-json-object"],
            "are both given; an output",
        ),
        (["generate", "x", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["generate", "x", "--tensor-parallel", "8"], "n_heads 4 is not a multiple of it; 1, 2, 4 split"),
        (["generate", "x", "--model", "/no/such/place"], "there is no directory /no/such/place"),
        (["generate"], "give a PROMPT, '-' to read one from stdin, or --input FILE.jsonl"),
        (["generate", "-", "-"], "stdin; give it only once"),
        (["generate", "x", "--input", "in.jsonl"], "give either PROMPTs or --input, not both"),
        (["generate", "x", "--output", "out.jsonl"], "--output needs --input"),
        (["generate", "--input", "/no/such/file"], "cannot open /no/such/file: No such file or directory"),
        (["generate", "--input", "/"], "cannot open /: Is a directory"),
        (["generate", "--input", "/dev/null", "--output", "/no/such/file"], "cannot open /no/such/file"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", is_terminal=True))
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("orca: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


# Text


def test_text_goes_to_stdout_and_notes_to_stderr(
    lent: Lent, tiny: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "ab", "cd", "--max-tokens", "9", "--seed", "5", "--ignore-eos"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, ignore_eos=True)
    first, second = tiny.generate(["ab", "cd"], params)
    assert captured.out == f"{first.text}\n\n{second.text}\n"
    assert "[1 of 2]" in captured.err
    assert "[2 of 2]" in captured.err
    assert captured.err.count("2 + 9 tokens") == 2
    assert captured.err.count("finish reason length, seed 5") == 2


def test_outputs_are_shown_one_after_another(lent: Lent, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "ab", "cd", "--n", "2", "--max-tokens", "7", "--seed", "5", "--ignore-eos"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    params = SamplingParams(n=2, max_tokens=7, temperature=0.8, seed=5, ignore_eos=True)
    results = lent.generate(["ab", "cd"], params)
    assert len({result.text for result in results}) == 4
    assert captured.out == "\n".join(f"{result.text}\n" for result in results)
    for i in range(1, 5):
        assert f"[{i} of 4]" in captured.err
    assert captured.err.count("seed 5") == captured.err.count("seed 6") == 2


def test_logprobs_are_tables_on_stderr(
    lent: Lent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["generate", "ab", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]
    assert cli.main([*arguments, "--logprobs", "2", "--prompt-logprobs", "0", "--n", "2"]) == 0
    captured = capsys.readouterr()
    params = SamplingParams(
        max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0, seed=0
    )
    (result,) = lent.generate("ab", params)
    assert captured.out == f"{result.text}\n\n{result.text}\n"
    assert result.logprobs is not None and result.prompt_logprobs is not None
    rows = [line.split() for line in captured.err.splitlines()]
    (prompt,) = result.prompt_logprobs
    percent = f"{100 * math.exp(prompt.logprob):.1f}"
    assert rows.count([str(prompt.token_id), "'b'", f"{prompt.logprob:.3f}", percent]) == 1, "shown once"
    for one in result.logprobs:
        logprob, percent = f"{one.logprob:.3f}", f"{100 * math.exp(one.logprob):.1f}"
        actual = [row for row in rows if str(one.token_id) in row[:1] and logprob in row]
        assert len(actual) >= 2, "in each of the two outputs"
        assert all(row.count(percent) >= 2 for row in actual), "its own, and as the likeliest"


def test_a_table_escapes_control_characters_and_whitespace() -> None:
    out = io.StringIO()
    tokens = [TokenLogprobs(token_id, -1.5, ((token_id, -math.inf),)) for token_id in (27, 10, 32, 91, 300)]
    table = logprob_table("Output", tokens, LETTERS)
    Console(file=out, force_terminal=True, width=100, color_system=None).print(table)
    rows = [line.split(maxsplit=1)[1].rstrip() for line in out.getvalue().splitlines() if "-1.500" in line]
    assert "\x1b[2J" not in out.getvalue()
    for row, text in zip(rows, [r"'\x1b'", r"'\n'", "' '", "'['", ""], strict=True):
        assert row.startswith(text)
        assert row.endswith(f"{text or 300} 0.0")


def test_a_terminal_shows_the_prompt_without_control_characters(
    lent: Lent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    assert (
        cli.main(["generate", "ab\x1b[2J", "--temperature", "50", "--ignore-eos", "--max-tokens", "40"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2mab\ufffd[2J\x1b[0m")
    assert "\x1b" not in out.removeprefix("\x1b[2mab\ufffd[2J\x1b[0m")


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_prompt_from_stdin(
    arguments: list[str],
    lent: Lent,
    tiny: LLM,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("zwölf\n".encode()))
    assert cli.main(["generate", *arguments, "--max-tokens", "5", "--temperature", "0"]) == 0
    (expected,) = tiny.generate("zwölf", SamplingParams(max_tokens=5, temperature=0.0))
    assert capsys.readouterr().out == f"{expected.text}\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "stdin is not UTF-8"),
        (b"\n", "no token"),
        (b"x" * 64, "at most 63"),
        (b"x" * (1 << 25), "stdin has more"),
    ],
)
def test_a_bad_prompt_from_stdin(
    data: bytes,
    message: str,
    lent: Lent,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert cli.main(["generate"]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_frees_the_slots(
    lent: Lent, tiny: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, reads_apart: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.commands.generating._show", interrupt)
    assert cli.main(["generate", "ab", "--max-tokens", "60", "--ignore-eos"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    tiny.generate([1], SamplingParams(max_tokens=2))
    assert tiny.service.scheduler.n_rsrv == 0


def test_a_terminal_shows_how_much_of_the_checkpoint_is_read(
    tiny: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: EngineConfig, *, on_load: Callable[[int, int], None], **_: object) -> Lent:
        for done in (1_000, 2_000_000):
            on_load(done, 4_000_000)
        return Lent(tiny)

    monkeypatch.setattr(orca_jax, "LLM", SimpleNamespace(from_config=load), raising=False)
    arguments = ["generate", "ab", "--max-tokens", "1"]
    assert cli.main(arguments) == 0
    assert "Loading" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "Loading the model" in captured.err
    assert "2.0/4.0 MB" in captured.err
    assert "Loading" not in captured.out


# Files


BAD_LINES: list[tuple[bytes, str, str | None, str]] = [
    (b"not json", "BadLine", "line", "not JSON"),
    (b'{"prompt": "a"', "BadLine", "line", "not JSON"),
    (b'{"prompt": "\xff"}', "BadLine", "line", "not UTF-8"),
    (b'["a"]', "BadLine", "line", "holds list, not an object"),
    (b"null", "BadLine", "line", "holds NoneType"),
    (b'{"prompt": "a", "prompt": "b"}', "BadLine", "line", "a key appears twice"),
    (b'{"prompt": "a", "temperature": NaN}', "BadLine", "line", "NaN is not a JSON value"),
    (b"[" * 100_000, "BadLine", "line", "nested too deeply"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "BadLine", "line", "not JSON"),
    (b"{}", "BadLine", "prompt", "the line has no prompt and no messages"),
    (b'{"prompt": "a", "max_token": 3}', "BadLine", "max_token", "unknown field 'max_token'"),
    (b'{"prompt": ""}', "EmptyPrompt", "prompt", "no token"),
    (b'{"prompt": []}', "EmptyPrompt", "prompt", "no token"),
    (b'{"prompt": 5}', "InvalidPrompt", "prompt", "not int"),
    (b'{"prompt": {"a": 1}}', "InvalidPrompt", "prompt", "not dict"),
    (b'{"prompt": [1, null]}', "InvalidPrompt", "prompt", "element 1"),
    (b'{"prompt": ["a", "b"]}', "InvalidPrompt", "prompt", "element 0"),
    (b'{"prompt": "\\ud800"}', "InvalidPrompt", "prompt", "lone surrogate"),
    (b'{"prompt": [260]}', "TokenOutOfRange", "prompt", "260"),
    (b'{"prompt": "' + b"x" * 64 + b'"}', "PromptTooLong", "prompt", "at most 63"),
    (b'{"prompt": "a", "max_tokens": 64}', "RequestTooLarge", "max_tokens", "at most 63"),
    (b'{"prompt": "a", "max_tokens": "9"}', "InvalidSamplingParameter", "max_tokens", "'9'"),
    (b'{"prompt": "a", "temperature": 1e999}', "InvalidSamplingParameter", "temperature", "inf"),
    (b'{"prompt": "a", "stop": [1]}', "InvalidSamplingParameter", "stop", "stop has 1; each of its"),
    (b'{"prompt": "a", "ignore_eos": 1}', "InvalidSamplingParameter", "ignore_eos", "true or false"),
    (b"x" * (MAX_LINE_BYTES * 3), "BadLine", "line", "more than"),
]


def test_a_file_with_every_kind_of_bad_line(
    lent: Lent, tiny: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = b'{"prompt": "ab", "max_tokens": 3, "temperature": 0, "ignore_eos": true}'
    lines = [b"\xef\xbb\xbf" + good]
    for line, *_ in BAD_LINES:
        lines += [line, b"  ", good]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))  # the last line has no newline
    sink.write_text("what was there before, and is longer\n" * 1000)
    assert cli.main(["generate", "--input", str(source), "--output", str(sink), "--overwrite"]) == 1
    first, *rest = records(sink)
    (expected,) = tiny.generate("ab", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    wanted = {
        "prompt": "ab",
        "text": expected.text,
        "token_ids": expected.token_ids,
        "finish_reason": "length",
        "n_input": 2,
    }
    assert first.items() >= wanted.items()
    assert [record["line"] for record in (first, *rest)] == [
        1,
        *(3 * i + k for i in range(len(BAD_LINES)) for k in (2, 4)),
    ]
    for (line, kind, param, message), bad, after in zip(BAD_LINES, rest[::2], rest[1::2], strict=True):
        assert (bad["error"]["type"], bad["error"]["param"]) == (kind, param), line[:80]
        assert message in bad["error"]["message"]
        assert "text" not in bad
        assert after.items() >= wanted.items()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{2 * len(BAD_LINES) + 1} lines, {len(BAD_LINES)} with errors" in captured.err


def test_flags_are_the_lines_defaults(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "a"}, {"prompt": [97], "max_tokens": 2, "seed": 8}, {"prompt": "naïve ☃"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--max-tokens", "4", "--seed", "7", "--ignore-eos", "--temperature", "2"]
    assert cli.main(["generate", "--input", str(source), *arguments]) == 0
    out = capsys.readouterr().out
    one, two, three = map(json.loads, out.splitlines())
    assert (len(one["token_ids"]), one["seed"]) == (4, 7)
    assert (len(two["token_ids"]), two["seed"], two["prompt"]) == (2, 8, [97])
    assert three["prompt"] == "naïve ☃"
    assert "naïve ☃" in out, "text is written as text"


# A value for each field as a line may have it, which is not the default of the flags below.
LINES: dict[str, Any] = {
    "n": 2,
    "max_tokens": 3,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": -0.5,
    "presence_penalty": 2,
    "logit_bias": {"97": 50.0, "98": -1},
    "seed": -3,
    "ignore_eos": True,
    "stop": ["zz"],
    "stop_token_ids": [3],
    "allowed_token_ids": [97, 98],
    "bad_words": ["x"],
    "logprobs": 1,
    "prompt_logprobs": 2,
    "guided_json": {"type": "object"},
    "guided_json_object": True,
    "guided_regex": "[a-z]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"+',
    "speculative": "off",
    "prediction": "aaa",
}


BEAM_LINE = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}


def test_a_line_may_set_every_field(lent: Lent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"return_routed_experts"}  # this model has no experts
    assert LINES.keys() | BEAM_LINE.keys() | refused == {field.name for field in fields(SamplingParams)}
    arrived: list[SamplingParams] = []
    submit = lent.service.submit

    def listening(prompt: CheckedPrompt, rules: OutputRules, **options: Any) -> Any:
        arrived.append(rules.sampling)
        return submit(prompt, rules, **options)

    monkeypatch.setattr(lent.service, "submit", listening)
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", name: value} for name, value in LINES.items()]
    lines.append({"prompt": "a", **BEAM_LINE})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--max-tokens", "4", "--temperature", "1"]
    assert cli.main(["generate", "--input", str(source), "--output", str(sink), *arguments]) == 0
    assert all("error" not in record for record in records(sink))
    wanted = [
        one
        for name, value in LINES.items()
        for one in replace(SamplingParams(max_tokens=4), **{name: value}).choices()
    ]
    # A search draws nothing; a random seed would make the records of two runs differ.
    assert arrived == [*wanted, SamplingParams(max_tokens=4, seed=0, **BEAM_LINE)]


def test_several_outputs_are_the_records_choices(lent: Lent, tmp_path: Path) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "ab", "n": 3, "seed": 4, "max_tokens": 5, "logprobs": 2, "prompt_logprobs": 1}\n'
        '{"prompt": "ab", "n": 1, "seed": 4, "max_tokens": 5, "logprobs": 0}\n'
        '{"prompt": "ab", "n": 2, "seed": 4, "max_tokens": 64}\n'
    )
    assert cli.main(["generate", "--input", str(source), "--output", str(sink), "--ignore-eos"]) == 1
    three, one, bad = records(sink)
    params = SamplingParams(
        n=3, seed=4, max_tokens=5, temperature=0.8, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    results = lent.generate("ab", params)

    def as_json(logprobs: list[TokenLogprobs] | None, n_top: int) -> list[dict[str, Any]]:
        assert logprobs is not None
        return [
            {"token_id": t, "logprob": pytest.approx(value, rel=1e-4), "top": tops(top[:n_top])}
            for t, value, top in logprobs
        ]

    def tops(top: tuple[tuple[int, float], ...]) -> list[Any]:
        return [[t, pytest.approx(value, rel=1e-4)] for t, value in top]

    for record in (three, one):
        assert len(record.pop("request_hash")) == len(record.pop("model_hash")) == 16
    assert three == {
        "line": 1,
        "prompt": "ab",
        "n_input": 2,
        "choices": [
            {
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": "length",
                "seed": 4 + i,
                "logprobs": as_json(result.logprobs, 2),
            }
            for i, result in enumerate(results)
        ],
        "prompt_logprobs": as_json(results[0].prompt_logprobs, 1),
    }
    assert one == {
        "line": 2,
        "prompt": "ab",
        "n_input": 2,
        "text": results[0].text,
        "token_ids": results[0].token_ids,
        "finish_reason": "length",
        "seed": 4,
        "logprobs": as_json(results[0].logprobs, 0),
    }
    assert (bad["error"]["param"], "choices" in bad) == ("max_tokens", False)
    lent.generate([1], SamplingParams(max_tokens=2))
    assert lent.service.scheduler.n_rsrv == 0


def test_a_probability_of_0_is_null() -> None:
    assert jsonl._logprobs([TokenLogprobs(1, -math.inf, ((2, -0.5), (1, -math.inf)))]) == [
        {"token_id": 1, "logprob": None, "top": [[2, -0.5], [1, None]]}
    ]


def test_an_empty_file(lent: Lent, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    assert (
        cli.main(["generate", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]) == 0
    )
    assert (tmp_path / "out").read_bytes() == b""


def test_the_output_must_not_be_the_input(
    lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link"
    source.write_text('{"prompt": "a"}\n')
    link.hardlink_to(source)
    for sink in (source, link):
        assert cli.main(["generate", "--input", str(source), "--output", str(sink)]) == 2
        assert "--output is the same file as --input" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "a"}\n'


def test_a_full_disk_is_reported(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n' * 9)
    assert cli.main(["generate", "--input", str(tmp_path / "in.jsonl"), "--output", "/dev/full"]) == 2
    assert "cannot write the output: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 3])
def test_a_long_file_is_read_only_as_far_as_it_is_needed(n: int, tiny: LLM) -> None:
    n_read = n_written = furthest = 0

    class Source(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            nonlocal n_read
            n_read += 1
            return b'{"prompt": "a", "max_tokens": 1}\n' if n_read <= 100 else b""

    class Sink(io.BytesIO):
        def write(self, data: Any, /) -> int:
            nonlocal n_written, furthest
            furthest = max(furthest, n_read - n_written)
            n_written += 1
            return super().write(data)

    sink = Sink()
    answers = AnswerStream(sink)
    assert jsonl.run(tiny, Source(), answers, SamplingParams(n=n), Console(file=io.StringIO())) == 0
    assert furthest == -(-4 * tiny.serving.max_batch_size // n)
    assert [json.loads(line)["line"] for line in sink.getvalue().splitlines()] == list(range(1, 101))


def test_when_the_engine_fails_lines_in_flight_have_no_records(tiny_directory: Path, tmp_path: Path) -> None:
    """In the next run, the engine's error would otherwise count as the line's answer."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": true}\n' * 9)
    quiet = Console(file=io.StringIO())
    with LLM(tiny_directory, max_batch_size=2) as llm:
        workers: Any = llm.service.scheduler.engine._workers  # pyright: ignore[reportAttributeAccessIssue]
        issue = workers.issue

        def lost(*arguments: Any) -> Any:
            if len(records(sink)) < 3:
                return issue(*arguments)
            raise MemoryError("gone")

        workers.issue = lost
        with (
            jsonl.open_files(str(source), str(sink)) as (lines, answers),
            pytest.raises(EngineError, match=r"not run; the same command goes on after line \d: .*gone"),
        ):
            jsonl.run(llm, lines, answers, SamplingParams(), quiet)
    written = records(sink)
    assert 3 <= len(written) < 9
    assert all(record["finish_reason"] == "length" for record in written)
    with (
        LLM(tiny_directory, max_batch_size=2) as llm,
        jsonl.open_files(str(source), str(sink)) as (lines, answers),
    ):
        assert jsonl.run(llm, lines, answers, SamplingParams(), quiet) == 0
    assert [record["line"] for record in records(sink)] == list(range(1, 10))


# For real


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def test_as_a_separate_program(tiny_directory: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "server.cli", "generate", "--model", str(tiny_directory)]
    done = subprocess.run(
        [*command, "--max-tokens", "8", "--ignore-eos"],
        input=b"a prompt",
        capture_output=True,
        timeout=SOON,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    notes = done.stderr.decode()
    assert len(notes.splitlines()) == 2, f"the notes and nothing else: {notes}"
    assert "8 + 8 tokens" in notes


def test_a_reader_that_leaves(tiny_directory: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n' * 2000)
    command = [sys.executable, "-m", "server.cli", "generate", "--model", str(tiny_directory)]
    with subprocess.Popen(
        [*command, "--input", str(tmp_path / "in.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b'"line": 1' in process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(SOON) == 1
    assert b"Traceback" not in stderr
    assert b"Broken" not in stderr
