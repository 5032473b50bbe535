"""The composition of an engine's configuration, and its contradictions."""

from dataclasses import asdict
from typing import Any

import pytest

from orca_jax.config import EngineConfig, ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel is 0; it must be a whole number from 1 to 1024"),
        ({"tensor_parallel": "two"}, "tensor_parallel is 'two'; it must be a whole number from 1 to 1024"),
        ({"tensor_parallel": True}, "tensor_parallel is True"),
        ({"workers": "a:1"}, "workers is 'a:1'; it must be a list of addresses"),
        ({"workers": ["a:1"], "worker_processes": True}, "workers and worker_processes exclude each other"),
        ({"workers": ["a:1"] * 2, "pipeline_parallel": 3}, "pipeline_parallel is 3, but there are 2 workers"),
        ({"on_compile": "never"}, "on_compile is 'never'; it must be one of warn, error"),
        ({"on_compile": "error"}, "set compile_ahead, or leave on_compile out"),
        ({"workers": ["a:1"], "on_compile": "error"}, "on_compile is set per worker"),
        (
            {"workers": ["a:1"], "command_buffer_collectives": True},
            "command_buffer_collectives is set per worker",
        ),
        ({"workers": ["a:1"], "expert_exchange": "gather"}, "expert_exchange is set per worker"),
        ({"expert_exchange": "all"}, "expert_exchange is 'all'; it must be one of auto, gather, exchange"),
        ({"attention": "quick"}, "attention is 'quick'; it must be one of kernel, cudnn"),
        ({"lora_extras": ["heads"]}, "['heads']; it must be a list of some of embedding, head, experts"),
        ({"lora_extras": "head"}, "lora_extras is 'head'; it must be a list of some of"),
        ({"max_loras": 1, "record": "a"}, "LoRA adapters (lora, max_loras) do not work with record yet"),
        ({"seed": 0.5}, "seed is 0.5; it must be a whole number or None"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**arguments)
    assert message in str(refused.value)


def test_each_running_worker_is_a_stage() -> None:
    parallel = ParallelConfig(workers=["a:1", "b:2"], tensor_parallel=3)
    assert (parallel.workers, parallel.pipeline_parallel, parallel.n_devices) == (("a:1", "b:2"), 2, 6)
    assert not parallel.in_this_process and not ParallelConfig(worker_processes=True).in_this_process
    assert ParallelConfig(pipeline_parallel=2).in_this_process


def test_worker_processes_may_fail_on_a_missing_program() -> None:
    """Worker processes compile ahead whatever the server's options say."""
    config = EngineConfig(worker_processes=True, on_compile="error")
    assert config.on_compile == "error" and not config.compile_ahead


def test_recorded_sizes_have_the_names_of_earlier_recordings() -> None:
    scheduling = SchedulingConfig(scheduling_policy="priority", prefill_tokens=7, aging_seconds=3)
    serving = ServingConfig(n_slots=64, scheduling=scheduling, overlap=False)
    recorded = serving.recorded()
    assert recorded["scheduling"] == {
        "policy": "default",
        "chunked_prefill": True,
        "prefill_tokens": 7,
        "prefix_caching": True,
        "snapshot_blocks": 64,
        "reservation": "on-demand",
        "order": "priority",
        "aging_seconds": 3,
        "speculative": "off",
        "speculative_tokens": 4,
    }
    assert ServingConfig.from_dict(recorded) == ServingConfig.from_dict(asdict(serving)) == serving
