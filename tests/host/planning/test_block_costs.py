"""The costs of blocks to read and to compute, beside sums by hand."""

import pytest

from orca_jax.config import ServingConfig, Sizes
from orca_jax.families.presets import PRESETS
from orca_jax.planning.block_costs import tier_costs
from orca_jax.planning.known_devices import GPUS
from orca_jax.planning.stage_memory import StageRoom

LLAMA = PRESETS["llama-3.1-8b"]
BLOCK = 16
BLOCK_BYTES = BLOCK * 32 * 2 * 8 * 128 * 2  # 16 tokens of 32 layers of 8 heads of 128, in bfloat16
SERVING = ServingConfig(
    block_size=BLOCK, host_block_bytes=BLOCK_BYTES, n_host_blocks=8, max_batch_tokens=2048
)
H200 = GPUS["h200"]
RATES = H200.rates("bfloat16")


def room(layers: range) -> StageRoom:
    return StageRoom(layers=layers, n_devices=1, itemsize=2, attention="kernel", free=None, modest=None)


def test_a_token_takes_its_multiplications_and_a_block_its_bytes() -> None:
    costs = tier_costs(LLAMA, [room(range(32))], Sizes(), SERVING, rates=RATES, gpu=H200)
    linear = 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # operations of a token
    assert costs.token == pytest.approx(linear / 989.5e12, rel=0.05)
    assert costs.pair == pytest.approx(4 * 32 * 4096 / 989.5e12, rel=0.05)
    assert costs.host == pytest.approx(BLOCK_BYTES / 64e9)
    assert costs.disk == costs.peer == costs.host, "bandwidths that nobody gave"
    assert costs.pays(costs.host, first=0, n=1)


def test_two_gpus_have_two_links_and_split_the_layers() -> None:
    stages = [room(range(16)), room(range(16, 32))]
    costs = tier_costs(LLAMA, stages, Sizes(), SERVING, rates=RATES, gpu=H200)
    assert costs.host == pytest.approx(BLOCK_BYTES / 128e9)


def test_a_slow_tier_pays_only_late_in_a_long_prompt() -> None:
    """At 4 GB/s a block of 2 MiB takes 0.52 ms, and its tokens 0.23 ms, or 0.78 ms after 100,000 others."""
    asked = Sizes(kv_host_bytes=1 << 30, kv_disk_bandwidth=5e9, kv_host_bandwidth=20e9)
    costs = tier_costs(LLAMA, [room(range(32))], asked, SERVING, rates=RATES, gpu=H200)
    assert costs.disk == pytest.approx(BLOCK_BYTES / 5e9 + BLOCK_BYTES / 20e9)
    assert costs.peer == costs.host == pytest.approx(BLOCK_BYTES / 20e9)
    assert not costs.pays(10 * costs.disk, first=0, n=10)
    assert costs.pays(10 * costs.disk, first=100_000 // BLOCK, n=10)
    assert costs.pays(10 * costs.host, first=0, n=10)
