"""The settings of `orca serve`: flags, variables, file and defaults, their precedence, and errors."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.options import options_of, values_of
from server import cli
from server.errors import UsageError
from server.parser import CommandParser
from server.settings.endpoint_options import EndpointOptions, RouterOptions
from server.settings.flags import MODEL, SERVE_OPTIONS, add_engine_flags, add_serve_flags
from server.settings.serve_settings import ServeSettings, layers, serve_settings

# For each setting four valid values, all different from each other and from the default.
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt2", "./here", "a/b", "off"),
    "max_batch_size": (1, 2, 3, 4),
    "n_slots": (16, 17, 18, 19),
    "max_batch_tokens": (512, 513, 514, 515),
    "max_queue": (1, 2, 3, 4),
    "max_queue_bytes": (1 << 20, 1 << 21, 1 << 22, 1 << 23),
    "max_queue_share": (0.1, 0.2, 0.3, 0.4),
    "deterministic": (True, False, True, False),
    "overlap": (False, True, False, True),
    "memory_fraction": (0.5, 1.0, 0.25, None),
    "policy": ("default", "orca", "default", "orca"),
    "chunked_prefill": (True, False, True, False),
    "prefill_tokens": (1, 2, 3, None),
    "snapshot_blocks": (1, 2, 3, 64),
    "snapshot_bytes": (0, 1, 2, None),
    "prefix_caching": (True, False, True, False),
    "reservation": ("full", "on-demand", "full", None),
    "scheduling_policy": ("priority", "fair", "fcfs", "priority"),
    "speculative": ("ngram", "off", "package.file:Class", "off"),
    "speculative_tokens": (1, 2, 3, 5),
    "dtype": ("float32", "bfloat16", "float16", "float32"),
    "load_format": ("dummy", "auto", "dummy", "auto"),
    "quantization": ("int8", "int4", "fp8", None),
    "kv_cache_dtype": ("int8", "fp8", "auto", "auto"),
    "generation_config": ("none", "auto", "some/directory", "auto"),
    "attention": ("kernel", "static", "follow_lengths", "native"),
    "command_buffer_collectives": (True, False, True, False),
    "expert_exchange": ("gather", "exchange", "auto", "gather"),
    "seed": (0, -1, 2**63, 7),
    "tensor_parallel": (2, 3, 4, 5),
    "pipeline_parallel": (2, 3, 4, 5),
    "compile_cache": ("a", "/b", "c d", None),
    "lora": ({"a": "b"}, {"a": "/b", "c": "d=e"}, {"a b": "c d"}, None),
    "lora_host_bytes": (0, 1, 2, 3),
    "kv_host_bytes": (1, 2, 3, 4),
    "kv_disk": (Path("a"), Path("/b"), Path("c d"), None),
    "kv_disk_bytes": (1 << 16, 1 << 17, 1 << 18, 1 << 19),
    "role": ("prefill", "decode", "both", "prefill"),
    "kv_transfer_address": ("a:1", "[::1]:2", "10.0.0.1:0", None),
    "kv_lease_seconds": (1.0, 2.5, 1e-3, 1e7),
    "kv_transfer_seconds": (1.0, 2.5, 1e-3, 1e7),
    "kv_host_bandwidth": (1.0, 2.5e9, 1e12, None),
    "kv_disk_bandwidth": (1.0, 2.5e9, 1e12, None),
    "kv_transfer_bandwidth": (1.0, 2.5e9, 1e12, None),
    "max_loras": (0, 1, 2, None),
    "max_lora_rank": (1, 16, 64, None),
    "lora_extras": (("head",), ("embedding", "head"), ("experts",), None),
    "record": (Path("a.jsonl"), Path("/b"), Path("c d"), None),
    "record_bytes": (1 << 16, 1 << 17, 1 << 18, 1 << 19),
    "compile_ahead": (False, True, False, True),
    "ready_early": (False, True, False, True),
    "on_compile": ("error", "warn", "error", "warn"),
    "host": ("0.0.0.0", "::1", "localhost", "10.1.2.3"),
    "port": (0, 1111, 2222, 3333),
    "grpc_port": (0, 4444, 5555, None),
    "tokenizer": ("a.json", "/b", "c d", None),
    "served_model_name": ("a", "naïve ☃", "7", None),
    "chat_template": (Path("a.jinja"), Path("/b"), Path("c d"), None),
    "tool_format": ("none", "hermes", "llama3", "auto"),
    "reasoning_format": ("think", "none", "gpt_oss", "auto"),
    "api_key_file": (None, None, None, None),  # the file is read: see below
    "admin_key_file": (None, None, None, None),
    "follow": (Path("a"), Path("/b"), Path("c d"), None),
    "ssl_certfile": (Path("a.pem"), Path("b.pem"), Path("c.pem"), Path("d.pem")),
    "ssl_keyfile": (Path("a.key"), Path("b.key"), Path("c.key"), Path("d.key")),
    "request_timeout": (1.0, 2.5, 1e-3, 1e7),
    "drain_timeout": (1.0, 2.5, 1e-3, 1e7),
    "end_with_stdin": (True, False, True, False),
    "max_body_bytes": (1024, 2048, 4096, 8192),
    "max_choices": (1, 2, 3, 4),
    "max_stored_responses": (0, 1, 2, 3),
    "max_stored_bytes": (1 << 16, 1 << 17, 1 << 18, 1 << 19),
    "stored_response_seconds": (1.0, 2.0, 3.0, 4.0),
    "max_inputs": (1, 2, 3, 4),
    "pooling": ("mean", None, "mean", "last"),
    "batch_dir": (Path("a"), Path("/b"), Path("c d"), None),
    "batch_bytes": (1 << 20, 1 << 21, 1 << 22, 1 << 23),
    "max_connections": (1, 2, 3, 4),
    "max_connections_per_address": (1, 2, 3, 4),
    "endpoint_processes": (0, 1, 2, 8),
    "max_header_bytes": (1024, 2048, 4096, 8192),
    "header_timeout": (1.0, 2.5, 1e-3, 1e7),
    "body_timeout": (1.0, 2.5, 1e-3, 1e7),
    "keep_alive_timeout": (1.0, 2.5, 1e-3, 1e7),
    "max_watch_streams": (0, 1, 2, 3),
    "log_probes": (True, False, True, False),
    "access_log": ("json", "off", "text", "json"),
    "otlp_traces_endpoint": ("https://flag/v1/traces", "http://variable:4318", "http://file", "http://none"),
    "pages": (False, True, False, True),
    "strict": (True, False, True, False),
    "allow_origins": ("https://a.example", "*", "http://localhost:3000, https://b.example", None),
    "workers": (("a:1",), ("a:1", "b:2"), ("unix:/a",), None),
    "worker_processes": (True, False, True, False),
    "control_secret_file": (None, None, None, None),  # the file is read as well
    "iteration_timeout": (1.0, 2.5, 1e-3, 1e7),
    "worker_timeout": (1.0, 2.5, 1e-3, 1e7),
    "ready_timeout": (1.0, 2.5, 1e-3, 1e7),
    "max_restarts": (0, 1, 2, 3),
    "restart_window": (1.0, 2.5, 1e-3, 1e7),
    "replicas": (1, 2, 3, None),
    "metric_names": ("vllm", "orca", "vllm", "orca"),
    "latency_budget": (0.05, 1.0, 1e-3, None),
    "predicted_context": (1, 2, 3, None),
    "kv_events": ("tcp://*:1", "ipc:///a", "tcp://b:2", "tcp://[::]:3"),
    "kv_events_replay": ("tcp://*:4", "ipc:///c", "tcp://d:5", None),
    "kv_events_topic": ("kv@pod@model", "a", "b", "c"),
    "prefix_hash_seed": ("a", "b", "c d", "0"),
}


def settings(
    *arguments: str, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> ServeSettings:
    """The settings with which `orca serve ARGUMENTS` would start."""
    return serve_settings(parsed(*arguments, file=file), environ or {})


def parsed(*arguments: str, file: Path | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="orca serve")
    add_serve_flags(parser)
    config = () if file is None else ("--config", str(file))
    return parser.parse_args([*arguments, *config])


def refused(*arguments: str, environ: Mapping[str, str] | None = None, file: Path | None = None) -> str:
    """The one-line error that `orca serve ARGUMENTS` prints."""
    with pytest.raises((UsageError, ConfigError)) as mistake:
        settings(*arguments, environ=environ, file=file)
    return str(mistake.value)


def flat(of: ServeSettings) -> dict[str, Any]:
    configs = (of.engine, of.endpoint, of.routing)
    return {name: value for one in configs for name, value in values_of(one).items()}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "orca.yaml"


# Defaults and help


def test_defaults_equal_the_declarations() -> None:
    nothing = settings()
    empty = settings(environ={"ORCA_PORT": "", "ORCA_CONFIG": "", "ORCA_MODEL": "", "HOME": "/"})
    assert flat(nothing) == flat(empty)
    assert (nothing.engine.model, nothing.notes, nothing.api_keys.required) == (None, (), False)
    # A server waits for its programs, and bounds what strangers may queue.
    served = {"compile_ahead": True, "ready_early": True, "max_queue_bytes": 1 << 30, "max_queue_share": 0.5}
    assert nothing.engine == EngineConfig(max_queue=1024, **served)
    assert (nothing.endpoint, nothing.routing) == (EndpointOptions(), RouterOptions())
    assert (nothing.endpoint.port, nothing.endpoint.grpc_port, nothing.engine.max_queue) == (8000, 8001, 1024)


def test_every_field_is_a_setting() -> None:
    names = {field.name for config in (EndpointOptions, RouterOptions) for field in fields(config)}
    names |= {option.name for option in options_of(EngineConfig)} - {"block_size", "control_secret"}
    assert {option.name for option in SERVE_OPTIONS} == names == set(VALUES)


def test_help_states_each_default_once_and_groups_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["serve", "--help"]) == 0
    stdout = capsys.readouterr().out
    groups = re.split(r"\n\n(?=[a-z ]+:\n)", stdout)
    titles = [group.split(":")[0] for group in groups[1:]]
    expected = ["options", "model and engine", "addresses", "security", "limits", "logging", "workers"]
    assert titles == [*expected, "routers"]
    for option in SERVE_OPTIONS:
        start = rf"\n  {'MODEL' if option.name == MODEL.name else option.flag}[ ,\n]"
        (group,) = (group for group in groups if re.search(start, group))
        entry = " ".join(re.split(start, group)[1].split("\n  -")[0].split("\n\n")[0].split())
        assert entry.count("(default: ") == 1, entry
        assert group.startswith(option.group)
    for line in (
        r"--port N +port for HTTP; 0 picks a free one \(default: 8000\)",
        r"--max-queue N +maximum number of waiting requests; more are refused \(default: 1024\)",
        r"--request-timeout X +maximum seconds from a request's arrival to its end \(default: 600\)",
        r"--ssl-keyfile FILE +private key \(PEM\) of --ssl-certfile \(default: none\)",
        r"--access-log \{text,json,off\} +log each request .* \(default: text\)",
        r"ORCA_MAX_QUEUE=64",
    ):
        assert re.search(line, stdout), line


def test_generate_waits_instead_of_rejecting(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser.add_argument_group())
    assert "max_queue" not in vars(parser.parse_args([]))
    assert cli.main(["generate", "x", "--max-queue", "3"]) == 2
    assert "--max-queue is a flag of `orca serve`, not of `orca generate`" in capsys.readouterr().err


# Precedence of layers


def as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return ",".join(f"{key}={each}" for key, each in value.items())  # pyright: ignore[reportUnknownVariableType]
    return "none" if value is None else str(value)


def as_flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={as_text(value)}"


LAYERS = st.fixed_dictionaries({name: st.sets(st.sampled_from(range(3))) for name in VALUES}).map(
    # A certificate and its key are set in the same layers: one alone is an error. Likewise events' addresses.
    lambda sources: (
        sources | {"ssl_keyfile": sources["ssl_certfile"], "kv_events_replay": sources["kv_events"]}
    )
)


@hypothesis_settings(max_examples=50)
@given(sources=LAYERS, dashes=st.booleans(), random=st.randoms(use_true_random=False))
def test_the_highest_layer_wins(
    sources: dict[str, set[int]], dashes: bool, random: Any, tmp_path_factory: Any
) -> None:
    values = {name: random.sample(VALUES[name], 3) for name in sources}
    values["port"], values["grpc_port"] = [0, 1111, 2222], [4444, None, 0]
    given = [{name: values[name][i] for name in sources if i in sources[name]} for i in range(3)]
    flags, variables, lines = given
    arguments = [as_flag(name, flags[name]) for name in flags if name != "model"]
    arguments += [flags["model"]] if "model" in flags else []
    environ = {f"ORCA_{name.upper()}": as_text(value) for name, value in variables.items()}
    document = {
        name.replace("_", "-") if dashes else name: as_text(value)
        if isinstance(value, Path | tuple | dict)
        else value
        for name, value in lines.items()
    }
    file = tmp_path_factory.getbasetemp() / "layers.yaml"
    file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    by_variable = random.random() < 0.5
    # Some of the values exclude each other, so no engine is made of them.
    args = parsed(*arguments, file=None if by_variable else file)
    result = layers(args, environ | ({"ORCA_CONFIG": str(file)} if by_variable else {}))
    assert result == lines | variables | flags


def test_adapters_come_from_several_flags() -> None:
    given = settings("--lora", "a=/x", "--lora", "b=y,c=z=z")
    assert given.engine.adapters == {"a": "/x", "b": "y", "c": "z=z"}
    assert "'a' is given twice; give each name once" in refused("--lora", "a=x", "--lora", "a=y")
    for text in ("a", "a=", "a=x,a=y"):
        assert "it must be NAME=VALUE, several separated by commas" in refused("--lora", text)


def test_the_flag_for_the_file_wins_over_the_variable(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("port: 1")
    (tmp_path / "b").write_text("port: 2")
    environ = {"ORCA_CONFIG": str(tmp_path / "a")}
    assert settings(environ=environ).endpoint.port == 1
    assert settings(environ=environ, file=tmp_path / "b").endpoint.port == 2


def test_none_in_a_higher_layer_unsets_a_value(yaml_file: Path) -> None:
    yaml_file.write_text("dtype: float16\nseed: 5\ngrpc-port: 9\nmodel: gpt2\n")
    result = settings("--grpc-port", "none", "none", environ={"ORCA_DTYPE": "None"}, file=yaml_file)
    assert (result.engine.model, result.engine.dtype, result.engine.seed, result.endpoint.grpc_port) == (
        None,
        None,
        5,
        None,
    )


def test_api_keys_from_file_and_variable(tmp_path: Path, yaml_file: Path) -> None:
    (tmp_path / "keys").write_text("of-the-file\n")
    yaml_file.write_text(f"api_key_file: {tmp_path / 'keys'}\n")
    (tmp_path / "keys").chmod(0o644)
    result = settings(environ={"ORCA_API_KEYS": "of-the-variable"}, file=yaml_file)
    result.api_keys.check("Bearer of-the-file")
    result.api_keys.check("Bearer of-the-variable")
    assert repr(result.api_keys) == "ApiKeys(2)"
    assert "of-the" not in repr(result)
    assert [note for note in result.notes if "others can read it" in note]
    (tmp_path / "keys").write_text("")
    assert "has no API key" in refused(file=yaml_file)
    (tmp_path / "keys").write_text("of-the-file weight=2\n")
    assert "scheduling policy 'fcfs' ignores" in refused(file=yaml_file)
    fair = settings(environ={"ORCA_SCHEDULING_POLICY": "fair"}, file=yaml_file)
    assert fair.api_keys.weights == {"key 1": 2.0}


def test_the_control_secret_from_a_file_or_the_variable(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of-the-file-0123456789\n")
    (tmp_path / "short").write_text("too-short\n")
    by_variable = {"ORCA_CONTROL_SECRET": " of-the-variable-0123456789 "}
    assert settings(environ=by_variable).engine.control_secret == "of-the-variable-0123456789"
    both = settings("--control-secret-file", str(tmp_path / "secret"), environ=by_variable)
    assert both.engine.control_secret == "of-the-file-0123456789"
    assert "0123456789" not in repr(both) and both.notes == ()
    message = refused("--control-secret-file", str(tmp_path / "short"))
    assert "holds a control secret of 9 characters; it needs at least 16" in message
    assert "too-short" not in message
    assert "the control secret:" in refused("--control-secret-file", str(tmp_path / "nowhere"))


# The file


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("access_log: off", "access_log", "off"),  # not a boolean, although YAML says so
        ("access_log: 'off'", "access_log", "off"),
        ("served_model_name: 1.10", "served_model_name", "1.10"),  # not a number
        ("served_model_name: no", "served_model_name", "no"),
        ("port: '8080'", "port", 8080),
        ("request_timeout: 1e3", "request_timeout", 1000.0),
        ("request_timeout: 30", "request_timeout", 30.0),
        ("grpc_port:", "grpc_port", None),
        ("grpc_port: ~", "grpc_port", None),
        ("grpc_port: none", "grpc_port", None),
        ("{port: 1, host: h}  # a comment", "host", "h"),
        ("--- \nport: 5\n...\n", "port", 5),
        ("\ufeffport: 6", "port", 6),
        ("", "port", 8000),
        ("# nothing\n", "port", 8000),
    ],
)
def test_valid_contents_of_a_file(text: str, name: str, value: Any, yaml_file: Path) -> None:
    yaml_file.write_text(text, encoding="utf-8")
    result = flat(settings(file=yaml_file))[name]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nprot: 2", "line 2: 'prot' is not a setting; did you mean port?"),
        ("max-que: 2", "line 1: 'max-que' is not a setting; did you mean max_queue?"),
        ("xyzzy: 2", "line 1: 'xyzzy' is not a setting"),
        ("config: other.yaml", "line 1: 'config' is not a setting"),
        ("api_keys: [a]", "line 1: 'api_keys' is not a setting; did you mean api_key_file?"),
        ("? [a]\n: 1", "line 1: a list is not a setting"),
        ("? {a: b}\n: 1", "line 1: a mapping is not a setting"),
        ("port: 1\nport: 1", "line 2: port appears twice"),
        ("max-queue: 1\nmax_queue: 2", "line 2: max_queue appears twice"),
        ("port: many", "line 1: port: invalid int value: 'many'; it must be a whole number"),
        ("port: 1.5", "line 1: port: invalid int value: '1.5'; it must be a whole number"),
        ("port: true", "line 1: port: invalid int value: 'true'"),
        ("port:", "line 1: port: there is no value; it must be a whole number"),
        ("port: [1]", "line 1: port: it is a list; it must be a whole number"),
        ("grpc_port: {a: 1}", "line 1: grpc_port: it is a mapping; it must be a whole number, or none"),
        ("port: !!python/object:os.system 1", "line 1: port: it is a value with the tag"),
        (
            "request_timeout: soon",
            "line 1: request_timeout: invalid float value: 'soon'; it must be a number",
        ),
        ("request_timeout: .nan", "line 1: request_timeout: invalid float value: '.nan'"),
        (
            "dtype: int8",
            "line 1: dtype: invalid choice: 'int8'; it must be one of float32, bfloat16, float16",
        ),
        ("port: " + "9" * 5000, "line 1: port: invalid int value"),
        ("<<: {port: 1}", "line 1: '<<' is not a setting"),
        ("- port", "holds a list; it must hold lines such as 'port: 8000'"),
        ("port", "holds a single value; it must hold lines"),
        ("port: 1\n---\nport: 2", "invalid YAML"),
        ("port: 1\n\tx", "line 2: invalid YAML"),
        ("port: *one", "line 1: invalid YAML: found undefined alias"),
        ("[" * 100_000, "invalid YAML: it is nested too deeply"),
        ('host: "\\UFFFFFFFF"', "invalid YAML"),
        ("host: a\x00b", "invalid YAML"),
        ("#" * 1_000_001, "has more than 1000000 bytes"),
        (b"host: \xff", "is not UTF-8: a wrong byte at 6"),
    ],
)
def test_an_error_in_a_file(text: str | bytes, message: str, yaml_file: Path) -> None:
    yaml_file.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refused(file=yaml_file)
    assert message in error
    assert str(yaml_file) in error


YAML_PIECES = st.sampled_from([*"\n:-?{}[]&*!|>'\"%@ ", "port", "none", "1"])


@given(text=st.text() | st.lists(YAML_PIECES).map("".join))
def test_any_text_is_a_valid_file_or_an_error(text: str, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        settings(file=file)
    except (UsageError, ConfigError):
        pass


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no cannot be read: No such file or directory" in refused(file=tmp_path / "no")
    assert "pipe cannot be read: it is not a regular file" in refused(
        environ={"ORCA_CONFIG": f"{tmp_path}/pipe"}
    )
    assert "cannot be read: Is a directory" in refused("--config", "")


# The environment


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ORCA_PORT": "many"}, "ORCA_PORT: invalid int value: 'many'; it must be a whole number"),
        ({"ORCA_PORT": "none"}, "ORCA_PORT: invalid int value: 'none'"),
        (
            {"ORCA_GRPC_PORT": "no"},
            "ORCA_GRPC_PORT: invalid int value: 'no'; it must be a whole number, or none",
        ),
        (
            {"ORCA_ACCESS_LOG": "TEXT"},
            "ORCA_ACCESS_LOG: invalid choice: 'TEXT'; it must be one of text, json, off",
        ),
        ({"ORCA_PORT": "65536"}, "port is 65536; it must be a whole number from 0 to 65535"),
        ({"ORCA_API_KEYS": "short"}, "ORCA_API_KEYS, key 1: an API key must have at least 8 characters"),
        ({"ORCA_HOST": " "}, "host is empty"),
    ],
)
def test_an_error_in_the_environment(environ: dict[str, str], message: str) -> None:
    assert message in refused(environ=environ)


def test_an_unknown_variable_is_reported_without_its_value() -> None:
    environ = {
        "ORCA_PROT": "secret",
        "ORCA_API_KEY": "secret",
        "ORCA_XYZZY": "",
        "ORCA_HTTP_PORT": "80",
        "ORCAS": "",
    }
    assert settings(environ=environ | {"ORCA_API_KEYS": "known-key"}).notes == (
        "the variable 'ORCA_API_KEY' is not a setting and has no effect; did you mean ORCA_API_KEYS?",
        "the variable 'ORCA_HTTP_PORT' is not a setting and has no effect; did you mean ORCA_GRPC_PORT?",
        "the variable 'ORCA_PROT' is not a setting and has no effect; did you mean ORCA_PORT?",
        "the variable 'ORCA_XYZZY' is not a setting and has no effect",
    )


def kubernetes(service: str) -> dict[str, str]:
    """The variables that Kubernetes sets in a pod for a Service of that name."""
    return {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
    }


def test_a_colliding_kubernetes_variable_is_explained() -> None:
    message = refused(environ=kubernetes("ORCA"))
    assert message == (
        "ORCA_PORT is 'tcp://10.0.0.1:8000', as Kubernetes sets it in pods for a Service called 'orca'; set "
        "ORCA_PORT or --port to a number, rename the Service, or set the pod's enableServiceLinks to false"
    )
    assert "a Service called 'orca-grpc'; set ORCA_GRPC_PORT or --grpc-port" in refused(
        environ=kubernetes("ORCA_GRPC")
    )


@pytest.mark.parametrize("service", ["ORCA", "ORCA_GRPC", "ORCA_SERVE", "ORCA_2"])
def test_other_kubernetes_variables_are_ignored(service: str) -> None:
    result = settings("--port", "80", "--grpc-port", "81", environ=kubernetes(service))
    assert (result.endpoint.port, result.endpoint.grpc_port, result.notes) == (80, 81, ())
    set_by_hand = kubernetes(service) | {"ORCA_PORT": "82", "ORCA_GRPC_PORT": "83"}
    result = settings(environ=set_by_hand)
    assert (result.endpoint.port, result.endpoint.grpc_port, result.notes) == (82, 83, ())


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "many"], "argument --port: invalid int value: 'many'; it must be a whole number"),
        (
            ["--grpc-port", ""],
            "argument --grpc-port: invalid int value: ''; it must be a whole number, or none",
        ),
        (["--port", "-1"], "port is -1; it must be a whole number from 0 to 65535"),
        (["--port", "8001"], "port and grpc_port are both 8001"),
        (["--ssl-keyfile", "k"], "ssl_certfile and ssl_keyfile belong together"),
        (["--drain-timeout", "nan"], "drain_timeout is nan; it must be above 0"),
        (["--header-timeout", "0"], "header_timeout is 0; it must be above 0 and at most 1e7 seconds"),
        (["--body-timeout", "-1"], "body_timeout is -1; it must be above 0"),
        (["--keep-alive-timeout", "inf"], "keep_alive_timeout is inf; it must be above 0 and at most 1e7"),
        (["--max-connections", "0"], "max_connections is 0; it must be a whole number from 1 to 1048576"),
        (
            ["--max-connections-per-address", "0"],
            "max_connections_per_address is 0; it must be a whole number from 1 to 1048576",
        ),
        (
            ["--max-header-bytes", "1023"],
            "max_header_bytes is 1023; it must be a whole number from 1024 to 1048576",
        ),
        (["--max-watch-streams", "-1"], "max_watch_streams is -1; it must be a whole number from 0 to 65536"),
        (
            ["--load-format", "pickle"],
            "argument --load-format: invalid choice: 'pickle'; it must be one of auto, dummy",
        ),
        (["--host", ""], "host is empty"),
        (["--served-model-name", ""], "served_model_name is ''; it must be 1 to 256 printable characters"),
        (["--served-model-name", "a\nb"], "served_model_name is 'a\\nb'; it must be 1 to 256 printable"),
        ([""], "the model's name is empty; leave it out for the demo model"),
        (["--api-key", "secret"], "--api-key is not a flag of `orca serve`"),
        (["--max-q", "5"], "--max-q is not a flag of `orca serve`"),
    ],
)
def test_an_error_on_the_command_line(arguments: list[str], message: str) -> None:
    text = refused(*arguments)
    assert message in text
    assert "\n" not in text


# Field types that no setting has yet, or that need tests of their own


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One field of each type."""

    truth: Annotated[bool, "100% true"] = True
    maybe: Annotated[bool | None, "true, false, or neither", "a group"] = None
    choice: Annotated[Literal["a", "b"] | None, "one of two"] = "a"
    path: Annotated[Path, "a path"] = Path("x")
    ratio: Annotated[float, "a ratio (default: half)"] = 0.5


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse flags made from Sample's fields as `add_serve_flags` does."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(message)

    parser = Parser()
    add_serve_flags(parser, options_of(Sample))
    assert "100% true (default: true)" in " ".join(parser.format_help().split())
    return vars(parser.parse_args(arguments))


def test_every_type_of_field() -> None:
    assert parse([]) == {}
    assert parse(["--truth", "--no-maybe", "--choice", "b", "--path", "y", "--ratio", "1e-1"]) == {
        "truth": True,
        "maybe": False,
        "choice": "b",
        "path": Path("y"),
        "ratio": 0.1,
    }
    assert parse(["--no-truth", "--choice", "NONE"]) == {"truth": False, "choice": None}
    with pytest.raises(
        UsageError, match="argument --choice: invalid choice: 'c'; it must be one of a, b, or none"
    ):
        parse(["--choice", "c"])
    truth, maybe, choice, path, ratio = options_of(Sample, "all")
    assert [option.group for option in (truth, maybe, choice, path, ratio)] == [
        "all",
        "a group",
        "all",
        "all",
        "all",
    ]
    assert [truth.parse(text) for text in ("true", "False", "on", "NO", "1", "0")] == [True, False] * 3
    assert (maybe.parse("none"), maybe.parse("off")) == (None, False)
    assert [option.full_help for option in (maybe, choice, path, ratio)] == [
        "true, false, or neither (default: none)",
        "one of two (default: a)",
        "a path (default: x)",
        "a ratio (default: half)",
    ]
    for text in ("none", "2", ""):
        with pytest.raises(ValueError, match=f"invalid bool value: '{text}'; it must be true or false"):
            truth.parse(text)


def test_prompts_of_api_keys_travel_only_with_a_secret() -> None:
    flags = ("--role=decode", "--kv-host-bytes=1000000")
    keys = {"ORCA_API_KEYS": "a-key-of-somebody"}
    assert re.search("role is 'decode' and requests need API keys.*; set", refused(*flags, environ=keys))
    settings(*flags, environ=keys | {"ORCA_CONTROL_SECRET": "a secret of all servers"})
    settings(*flags)
    settings(environ=keys)
