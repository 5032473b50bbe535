"""A worker process's options survive the round trip through its command line."""

import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import Deadlines, EngineConfig, RestartBound
from orca_jax.errors import ConfigError
from orca_jax.workers.worker_options import WorkerOptions

# Every field unlike its default, so that one left out of the text shows.
ENGINE = EngineConfig(
    model="a model",
    load_format="dummy",
    quantization="int4",
    kv_cache_dtype="fp8",
    dtype="bfloat16",
    generation_config="none",
    pooling="mean",
    tokenizer="t",
    seed=3,
    speculative_tokens=7,
    attention="static",
    max_batch_size=2,
    n_slots=64,
    max_batch_tokens=128,
    block_size=8,
    max_queue=5,
    max_queue_bytes=1 << 20,
    max_queue_share=0.5,
    overlap=False,
    command_buffer_collectives=True,
    memory_fraction=0.25,
    chunked_prefill=True,
    prefill_tokens=64,
    snapshot_blocks=8,
    snapshot_bytes=1 << 20,
    prefix_caching=True,
    kv_host_bytes=1 << 20,
    kv_disk_bytes=1 << 20,
    kv_lease_seconds=1,
    kv_transfer_seconds=1,
    reservation="full",
    scheduling_policy="priority",
    tensor_parallel=2,
    pipeline_parallel=3,
    worker_processes=True,
    expert_exchange="exchange",
    compile_ahead=True,
    ready_early=True,
    on_compile="error",
    compile_cache="a folder",
    deadlines=Deadlines(
        iteration_seconds=1, worker_seconds=2, ready_seconds=3, retry_seconds=4, look_seconds=5
    ),
    restarts=RestartBound(restarts=1, seconds=2),
    control_secret="a secret of theirs",
    adapters={"a": "b"},
    max_loras=3,
    max_lora_rank=4,
    lora_extras=("head",),
    lora_host_bytes=1 << 20,
    record_bytes=1 << 20,
)
OPTIONS = WorkerOptions(
    stage=1,
    engine=ENGINE,
    listen="unix:/a",
    data_host="b",
    link="nccl",
    coordinator="a:1",
    end_with_stdin=True,
)


def defaults(config: Any, but: Collection[str]) -> list[str]:
    """The fields, including nested ones, that have their default."""
    names: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            names += defaults(value, but)
        elif value == field.default and field.name not in but:
            names.append(field.name)
    return names


def test_the_child_reads_what_the_parent_writes() -> None:
    # These exclude other fields that OPTIONS gives.
    excluded = (
        "workers",
        "deterministic",
        "policy",
        "speculative",
        "record",
        "kv_disk",
        "kv_host_bandwidth",
        "kv_disk_bandwidth",
        "kv_transfer_bandwidth",
        "role",
        "kv_transfer_address",
    )
    assert defaults(OPTIONS, but=excluded) == []
    assert WorkerOptions.from_json(OPTIONS.as_json()) == OPTIONS
    orca = replace(OPTIONS, engine=EngineConfig(deterministic=True, policy="orca", pipeline_parallel=2))
    assert WorkerOptions.from_json(orca.as_json()) == orca
    assert "a secret of theirs" not in repr(OPTIONS)


def test_a_path_is_read_as_its_name() -> None:
    engine = EngineConfig(model=Path("/a"), compile_cache=Path("/b"), workers=["a:1", "b:2"])
    read = WorkerOptions.from_json(WorkerOptions(stage=0, engine=engine, listen="a:1").as_json()).engine
    assert (read.model, read.compile_cache, read.workers) == ("/a", "/b", ("a:1", "b:2"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "7", '{"engine": []}', '{"engine": {}}', '{"engine": {"nothing": 1}, "stage": 0}']
    + [json.dumps(json.loads(OPTIONS.as_json()) | {"stage": 3})],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^the worker's options are malformed: "):
        WorkerOptions.from_json(text)
