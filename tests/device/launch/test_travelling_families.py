"""Every family's blocks in a host tier, on a disk and from another engine: tokens are transformers'.

The states of recurrent layers go with them. Models with an encoder are refused by name, since their blocks do
not say everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError
from orca_jax.model_files.found_model import find_model
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.scheduling_params import SchedulingParams
from tests.device.model.golden import DIRECTORY, NAMES, Golden, load_golden

RECURRENT = tuple(name for name in NAMES if find_model(DIRECTORY / name, "auto").config.has_state)
FEW = ("mistral-window", "deepseek-v3-groups-yarn-dense-first", RECURRENT[0])
WITH_ENCODER = tuple(sorted(path.parent.name for path in DIRECTORY.glob("*/encoder_golden.npz")))
BLOCK, N_OUTPUT, N_PROMPTS = 4, 6, 6
SIZES: dict[str, Any] = {
    "max_batch_size": 2,
    "max_batch_tokens": 16,
    "block_size": BLOCK,
    "kv_host_bytes": 4 << 20,
    "compile_ahead": False,
    "kv_transfer_seconds": 200.0,
}


@dataclass(frozen=True)
class Case:
    """A model, its options, and prompts with the outputs that they must have."""

    directory: Path
    options: Mapping[str, Any]
    prompts: Sequence[tuple[int, ...]]
    outputs: Sequence[tuple[int, ...]]

    def engine(self, **other: Any) -> LLM:
        return LLM(self.directory, **{**SIZES, **self.options, **other})

    def n_cached(self, llm: LLM, row: int, transfer: KVTransferParams | None = None) -> int:
        """The tokens of a prompt that an engine found, after it has given the right output."""
        params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
        scheduling = SchedulingParams(kv_transfer=transfer)
        with llm.service.submit(self.prompts[row], params, scheduling=scheduling) as generation:
            result = generation.result(200)
        assert tuple(result.token_ids) == self.outputs[row]
        return result.n_cached

    def lease(self, llm: LLM, row: int) -> KVTransferParams:
        """Let an engine compute a prompt for another one."""
        params = SamplingParams(max_tokens=1, temperature=0)
        scheduling = SchedulingParams(kv_transfer=KVTransferParams(do_remote_decode=True))
        with llm.service.submit(self.prompts[row], params, scheduling=scheduling) as generation:
            generation.result(200)
        assert generation.kv_lease is not None
        return generation.kv_lease

    def full(self, row: int, n_more: int = 0) -> int:
        """The tokens of a prompt and `n_more` known ones that are in full blocks before the last of them."""
        return (len(self.prompts[row]) + n_more - 1) // BLOCK * BLOCK

    def one_request(self) -> int:
        """The slots of one request of the model's full length, which evicts what was there before."""
        return -(-find_model(self.directory, "auto").config.n_positions // BLOCK) * BLOCK

    def travels(self, directory: Path) -> None:
        """Check the outputs from all places that blocks come from."""
        with self.engine(n_slots=self.one_request(), kv_disk=directory) as llm:
            host = llm.service.scheduler.kv.host
            assert host is not None
            for row in range(len(self.prompts)):
                self.n_cached(llm, row)
            for row in range(2):  # evicted from the devices by the others
                n_read = host.n_read
                assert self.n_cached(llm, row) == self.full(row)
                assert host.n_read > n_read
        with (
            self.engine(kv_disk=directory, role="prefill") as again,
            self.engine(role="decode") as other,
        ):
            disk, arriving = again.service.scheduler.kv.disk, other.service.scheduler.kv.arriving
            assert disk is not None and arriving is not None
            for row in range(2):
                n_read = disk.files.n_read
                assert self.n_cached(again, row) == self.full(row)
                assert disk.files.n_read > n_read and not disk.files.n_bad
            for row in range(1, 3):
                n_blocks = arriving.n_blocks
                transfer = self.lease(again, row)
                assert self.n_cached(other, row, transfer) == self.full(
                    row, transfer.first_token_id is not None
                )
                assert arriving.n_blocks > n_blocks and not arriving.n_failed


def longest_prompts(golden: Golden) -> list[int]:
    """The longest prompts whose first tokens are sure."""
    rows = [row for row in range(len(golden.prompts)) if len(golden.sure(row)) >= N_OUTPUT]
    rows.sort(key=lambda row: -len(golden.prompts[row]))
    assert len(rows) >= N_PROMPTS and len(golden.prompts[rows[N_PROMPTS - 1]]) > 2 * BLOCK
    return rows[:N_PROMPTS]


def golden_case(name: str) -> Case:
    golden = load_golden(name)
    rows = longest_prompts(golden)
    prompts = [golden.prompts[row] for row in rows]
    # A snapshot at each border of two blocks, so that hybrids find what others find.
    options = {"snapshot_blocks": 1} if name in RECURRENT else {}
    return Case(golden.directory, options, prompts, [golden.sure(row)[:N_OUTPUT] for row in rows])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.long) for name in NAMES]
)
def test_tokens_are_the_same_from_a_host_tier_a_disk_and_another_engine(name: str, tmp_path: Path) -> None:
    golden_case(name).travels(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.matrix),
        pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.matrix),
        pytest.param({"reservation": "on-demand", "chunked_prefill": True}, marks=pytest.mark.matrix),
        pytest.param({"chunked_prefill": False, "max_batch_tokens": 256}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_caches_of_eight_bits_and_other_policies(options: Mapping[str, Any], tmp_path: Path) -> None:
    """The outputs are those of an engine without tiers, which computes each prompt whole."""
    golden = load_golden("llama-grouped")
    prompts = [golden.prompts[row] for row in longest_prompts(golden)]
    alone = {**SIZES, **options, "kv_host_bytes": 0, "prefix_caching": False}
    with LLM(golden.directory, **alone) as llm:
        params = SamplingParams(max_tokens=N_OUTPUT, temperature=0, ignore_eos=True)
        outputs = [tuple(one.token_ids) for one in llm.generate([[*prompt] for prompt in prompts], params)]
    Case(golden.directory, options, prompts, outputs).travels(tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_states_travel_between_servers_of_different_stages(role: str) -> None:
    """Keys, values and states of one role's layers are on two stages, and of the other's on one."""
    case = golden_case("bamba-grouped")
    splits: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}, role: {"pipeline_parallel": 2}}
    with (
        case.engine(role="prefill", **splits["prefill"]) as prefill,
        case.engine(role="decode", **splits["decode"]) as decode,
    ):
        for row in range(2):
            transfer = case.lease(prefill, row)
            n_known = transfer.first_token_id is not None
            assert case.n_cached(decode, row, transfer) == case.full(row, n_known)


@pytest.mark.matrix
def test_states_travel_where_two_devices_share_them(tmp_path: Path) -> None:
    case = golden_case("bamba-grouped")
    replace(case, options={**case.options, "tensor_parallel": 2}).travels(tmp_path)


@pytest.mark.matrix
def test_states_of_other_shares_are_not_fetched() -> None:
    """Servers see that before a transfer, and the prompt is computed."""
    case = golden_case("bamba-grouped")
    with case.engine(role="prefill", tensor_parallel=2) as prefill, case.engine(role="decode") as decode:
        assert case.n_cached(decode, 0, case.lease(prefill, 0)) == 0


def test_no_tier_and_no_lease_for_encoders() -> None:
    """The keys and values of a decoder depend on what its encoder reads."""
    for name in WITH_ENCODER:
        with pytest.raises(ConfigError, match=r"kv_host_bytes is .*, and the model has an encoder"):
            LLM(DIRECTORY / name, **SIZES)
