"""The arguments of the application: those of `orca serve`, checked before any replica starts."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.errors import ConfigError, OrcaError
from server.errors import UsageError
from server.ray.app import build_app
from server.ray.settings import ray_settings


def test_values_may_be_texts_or_values() -> None:
    texts, replicas = ray_settings({"max-batch-size": "8", "num_replicas": "3", "compile_ahead": "false"}, {})
    values, _ = ray_settings({"max_batch_size": 8, "compile_ahead": False}, {})
    assert texts.engine == values.engine and texts.engine.max_batch_size == 8
    assert not texts.engine.compile_ahead and replicas.num_replicas == 3


def test_variables_apply_and_arguments_come_first() -> None:
    environ = {"ORCA_MAX_BATCH_SIZE": "4", "ORCA_MAX_QUEUE": "7"}
    settings, _ = ray_settings({"max_batch_size": 8}, environ)
    assert (settings.engine.max_batch_size, settings.engine.max_queue) == (8, 7)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_replica": 2}, "'num_replica' is not a setting.*num_replicas"),
        ({"port": 9000}, "port has no effect under Ray Serve"),
        ({"max_batch_size": "many"}, "max_batch_size: invalid int"),
        ({"max_batch_size": [1]}, "max_batch_size is list; it must be a whole number"),
        ({"router": "random"}, "router: invalid choice"),
        ({"record": "all.jsonl"}, "each engine would write it"),
        ({"follow": "run"}, "new weights at different times"),
        ({"kv_events": "tcp://*:5557"}, "each engine would bind it"),
        ({"workers": "a:1,b:2", "num_replicas": 2}, "workers are those of one engine"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_a_mistake_is_reported_before_ray_starts_anything(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OrcaError, match=message):
        build_app(args)


def test_settings_for_a_single_engine_are_refused_from_every_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grpc_port has no effect"):
        ray_settings({}, {"ORCA_GRPC_PORT": "9001"})
    with pytest.raises(ConfigError, match="admin keys"):
        ray_settings({}, {"ORCA_ADMIN_KEYS": "a-long-secret"})
    (tmp_path / "serve.yaml").write_text("ssl_keyfile: key.pem\nssl_certfile: chain.pem\n")
    with pytest.raises(OrcaError, match="ssl_certfile has no effect"):
        ray_settings({}, {"ORCA_CONFIG": str(tmp_path / "serve.yaml")})
    with pytest.raises(UsageError, match="grpc_port has no effect"):
        ray_settings({"grpc_port": "none"}, {})


def test_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "programs"):
        (tmp_path / name).mkdir()
    args = {"model": "model", "compile_cache": "programs", "chat_template": "chat.jinja"}
    settings, _ = ray_settings(args, {})
    assert settings.engine.model == str(tmp_path / "model")
    assert settings.engine.compile_cache == str(tmp_path / "programs")
    assert settings.endpoint.chat_template == tmp_path / "chat.jinja"
    assert settings.engine.generation_config == "auto"
