"""The option command_buffer_collectives reaches every stage's programs.

What XLA makes of it on GPUs is in test_forward_compiles.py.
"""

from pathlib import Path
from typing import Any

import pytest

import orca_jax
from orca_jax.errors import ConfigError
from orca_jax.execution import worker
from orca_jax.execution.stage import Stage
from orca_jax.launch import precompile


@pytest.fixture
def collective_flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The option's value for each stage that is made."""
    flags: list[bool] = []

    def make(*args: Any, command_buffer_collectives: bool, **more: Any) -> Stage:
        flags.append(command_buffer_collectives)
        return Stage(*args, **more, command_buffer_collectives=command_buffer_collectives)

    monkeypatch.setattr(worker, "Stage", make)
    return flags


def test_each_stage_of_an_engine_gets_the_flag(collective_flags: list[bool]) -> None:
    with orca_jax.LLM(pipeline_parallel=2, n_slots=1024, command_buffer_collectives=True):
        assert collective_flags == [True, True]
    with orca_jax.LLM(n_slots=1024):
        assert collective_flags == [True, True, False]


def test_programs_compiled_ahead_have_the_flag(
    collective_flags: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "compile_all", lambda programs, on_program: None)  # for minutes
    kept = str(tmp_path)
    orca_jax.compile_model("demo", n_slots=1024, command_buffer_collectives=True, compile_cache=kept)
    assert collective_flags == [True]


def test_remote_workers_get_the_flag_from_their_own_command_line() -> None:
    with pytest.raises(ConfigError, match="command_buffer_collectives is set per worker"):
        orca_jax.LLM(workers=["127.0.0.1:7000"], command_buffer_collectives=True)
