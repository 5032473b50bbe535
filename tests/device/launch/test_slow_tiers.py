"""Tiers that are stated to be slow: their blocks are computed again, with the same tokens."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from tests.device.launch.test_travelling_families import golden_case

SLOW = 1e3  # bytes a second, of which a block has thousands
QUICK = 1e15
BANDWIDTHS = [SLOW, pytest.param(QUICK, marks=pytest.mark.matrix)]
CASE = golden_case("llama-grouped")


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A disk tier with the prompts' blocks."""
    with CASE.engine(kv_disk=tmp_path) as llm:
        for row in range(2):
            CASE.n_cached(llm, row)
    return tmp_path


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_a_slow_host_tier_computes(bandwidth: float) -> None:
    with CASE.engine(n_slots=CASE.one_request(), kv_host_bandwidth=bandwidth) as llm:
        host = llm.service.scheduler.kv.host
        assert host is not None
        for row in (0, 1, 2, 3):
            CASE.n_cached(llm, row)
        assert host.n_stored > 0
        assert CASE.n_cached(llm, 0) == (0 if bandwidth == SLOW else CASE.full(0))
        assert (host.n_read > 0) == (bandwidth == QUICK)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_a_slow_disk_computes(filled: Path, bandwidth: float) -> None:
    with CASE.engine(kv_disk=filled, kv_disk_bandwidth=bandwidth) as llm:
        disk = llm.service.scheduler.kv.disk
        assert disk is not None
        assert CASE.n_cached(llm, 1) == (0 if bandwidth == SLOW else CASE.full(1))
        assert (disk.files.n_read > 0) == (bandwidth == QUICK)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_a_slow_network_computes(bandwidth: float) -> None:
    with (
        CASE.engine(role="prefill") as prefill,
        CASE.engine(role="decode", kv_transfer_bandwidth=bandwidth) as decode,
    ):
        arriving = decode.service.scheduler.kv.arriving
        assert arriving is not None
        n_cached = CASE.n_cached(decode, 0, CASE.lease(prefill, 0))
        assert (n_cached > 0) == (arriving.n_blocks > 0) == (bandwidth == QUICK)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"kv_disk_bandwidth": 0.5}, "kv_disk_bandwidth is 0.5; it must be a number of bytes a second"),
        ({"kv_host_bandwidth": 1e9}, r"kv_host_bandwidth is 1e\+09, and kv_host_bytes is 0"),
        (
            {"kv_host_bandwidth": 1e9, "kv_host_bytes": 1 << 20, "worker_processes": True},
            "kv_host_bandwidth does not work with workers or worker_processes yet",
        ),
    ],
)
def test_bandwidths_of_nothing_are_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**asked)
