"""A disk tier over restarts: prompts are found again, by the same model alone, with the same tokens."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.launch.disk_blocks import fingerprint
from orca_jax.model_files.found_model import find_model
from tests.device.model.golden import load_golden

GOLDEN = load_golden("llama-grouped")
PROMPTS = [list(prompt) for prompt in GOLDEN.prompts if 40 < len(prompt) < 80]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 64, "n_slots": 192, "block_size": 4}


def run(
    directory: Path, prompts: list[list[int]] = PROMPTS, model: Path = GOLDEN.directory, **other: Any
) -> tuple[list[list[int]], list[int]]:
    """The tokens that an engine with this directory gives, and how many of each prompt it found."""
    sizes = SIZES | {"kv_host_bytes": 1 << 20, "kv_disk": directory} | other
    with LLM(model, **sizes) as llm:
        results = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
        return [result.token_ids for result in results], [result.n_cached for result in results]


@pytest.mark.long
def test_prompts_are_found_after_a_restart_and_damaged_files_are_not(tmp_path: Path) -> None:
    tokens, found = run(tmp_path)
    assert not any(found)
    again, found = run(tmp_path)
    assert again == tokens and all(n >= len(prompt) - 5 for n, prompt in zip(found, PROMPTS, strict=True))
    assert not any(run(tmp_path, PROMPTS[:2], dtype="bfloat16")[1]), "of another dtype"
    for path in tmp_path.rglob("??/*"):
        path.write_bytes(path.read_bytes()[:-9] + b"nonsense!")
    again, found = run(tmp_path)
    assert again == tokens and not any(found)
    assert all(run(tmp_path)[1]), "and written again"


@pytest.mark.long
def test_a_hybrid_s_states_are_found_after_a_restart_and_damaged_ones_are_not(tmp_path: Path) -> None:
    golden = load_golden("bamba-grouped")
    prompts = [list(prompt) for prompt in golden.prompts if 20 < len(prompt) < 50][:4]

    def again() -> tuple[list[list[int]], list[int]]:
        return run(tmp_path, prompts, golden.directory, snapshot_blocks=1, compile_ahead=False)

    tokens, found = again()
    assert not any(found)
    full = [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    assert again() == (tokens, full)
    # A state has 2,592 bytes, and a block 512.
    files = [path for path in tmp_path.rglob("??/*") if path.stat().st_size > 2592]
    assert len(files) > len(prompts)
    for path in files:
        path.write_bytes(path.read_bytes()[:-9] + b"nonsense!")
    assert again() == (tokens, [0] * len(prompts)), "blocks without a state are of no use"
    assert again() == (tokens, full), "and written again"


@pytest.mark.long
def test_new_weights_neither_write_nor_read(tmp_path: Path) -> None:
    tokens, _ = run(tmp_path)
    n_files = len([*tmp_path.rglob("??/*")])
    with LLM(GOLDEN.directory, **SIZES, kv_host_bytes=1 << 20, kv_disk=tmp_path) as llm:
        llm.update_weights(GOLDEN.directory)
        results = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert [result.token_ids for result in results] == tokens
        assert not any(result.n_cached for result in results)
    assert len([*tmp_path.rglob("??/*")]) == n_files


def test_a_fingerprint_tells_apart_all_that_changes_the_bytes(tmp_path: Path) -> None:
    def key(
        directory: Path = GOLDEN.directory, dtype: str = "float32", kinds: tuple[str, ...] = (), **other: Any
    ) -> str:
        config = EngineConfig(directory, **other)
        return fingerprint(find_model(directory, config.load_format), config, dtype, kinds)

    for path in GOLDEN.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    keys = [
        key(),
        key(tmp_path),  # files of another time
        key(dtype="bfloat16"),
        key(kinds=("a",)),
        key(block_size=8),
        key(quantization="int8"),
        key(load_format="dummy"),
        key(load_format="dummy", seed=1),
    ]
    assert len(set(keys)) == len(keys) and key() == keys[0]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"kv_host_bytes": 0}, "kv_disk is 'd', and kv_host_bytes is 0: .*; add kv_host_bytes"),
        ({"worker_processes": True}, "kv_disk does not work with workers or worker_processes yet"),
    ],
)
def test_what_it_does_not_work_with_is_refused(other: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**{"kv_disk": "d", "kv_host_bytes": 1 << 20, **other})
