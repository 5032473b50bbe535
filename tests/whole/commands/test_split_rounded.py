"""Weights rounded at load, over stages and devices: the tokens of one device, and the plan's bytes."""

import json
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.config import Rounding
from orca_jax.errors import ConfigError, UnevenBlocks
from orca_jax.execution import matmul_backend
from orca_jax.families.hf_config import read_config
from server import cli
from tests.device.model.formed_models import device_bytes
from tests.device.model.golden import DIRECTORY, MARGIN, load_golden
from tests.whole.commands.test_split_families import CHOSEN

N_PROMPTS, N_TOKENS = 6, 8


def options(name: str, to: Rounding) -> dict[str, Any]:
    sizes = {"max_batch_size": 8, "max_batch_tokens": max(64, read_config(DIRECTORY / name).n_positions)}
    return {"quantization": to, "dtype": "float32", "deterministic": True, **sizes}


def prompts_of(name: str) -> list[list[int]]:
    # A text that is scored has room for one more token.
    longest = read_config(DIRECTORY / name).n_positions - N_TOKENS - 1
    return [list(one[:longest]) for one in load_golden(name).prompts[:N_PROMPTS]]


PARAMS = SamplingParams(max_tokens=N_TOKENS, temperature=0, ignore_eos=True, logprobs=2)


# The inputs of most golden layers are no multiple of 32 a device, as int4 needs them.
CASES = [("llama", "int8")] + [
    pytest.param(family, to, marks=pytest.mark.long)
    for to, families in {
        "int8": [family for family in CHOSEN if family != "llama"],
        "fp8": ["qwen3", "gemma3_text", "deepseek_v3"],
        "int4": ["gpt2"],
    }.items()
    for family in families
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "to"), CASES)
def test_stages_of_two_devices(
    family: str, to: Rounding, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, n_devices = CHOSEN[family]
    check(name, to, n_devices, capsys, monkeypatch)


def check(
    name: str,
    to: Rounding,
    n_devices: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages of `n_devices` devices have one device's tokens, and hold what `orca plan` says.

    Products are XLA's, of the numbers that packed weights stand for: C rounds activations, and a device with
    fewer inputs rounds others.
    """
    monkeypatch.setattr(matmul_backend, "has_packed_form", lambda *_: False)
    prompts, split = prompts_of(name), {"tensor_parallel": n_devices, "pipeline_parallel": 2}
    with LLM(DIRECTORY / name, **options(name, to)) as llm:
        alone = llm.generate(prompts, PARAMS)
        texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, alone, strict=True)]
        expected = np.concatenate(llm.score(texts))
    with LLM(DIRECTORY / name, **split, **options(name, to)) as llm:
        together = llm.generate(prompts, PARAMS)
        np.testing.assert_allclose(np.concatenate(llm.score(texts)), expected, atol=MARGIN)
        engine: Any = llm.service.scheduler.engine
        held = [device_bytes(worker.stage.weights) for worker in engine._workers.workers]
    n_sure = 0
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs is not None
        gaps = [-float(np.diff([logprob for _, logprob in token.top[:2]])[0]) for token in one.logprobs]
        sure = next((i for i, gap in enumerate(gaps) if gap < MARGIN), len(gaps))
        assert one.token_ids[:sure] == other.token_ids[:sure]
        n_sure += sure
    assert n_sure > N_PROMPTS * N_TOKENS / 2
    capsys.readouterr()
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in split.items()]
    flags += [f"--quantization={to}", "--dtype=float32", "--device=cpu", "--no-compile", "--json"]
    assert cli.main(["plan", str(DIRECTORY / name), *flags]) == 0
    assert [stage["weights"] for stage in json.loads(capsys.readouterr().out)["stages"]] == held


@pytest.mark.parametrize(
    ("name", "n_devices", "error", "says"),
    [
        ("llama-dynamic", 1, ConfigError, "needs multiples of 32 inputs, but .* use int8 or fp8"),
        ("bloom-eps", 2, UnevenBlocks, "32 inputs of layers.0.out.weight are packed in blocks of 32"),
        ("falcon-new-one-norm-linear", 2, UnevenBlocks, "are packed in blocks of 32, of which each device"),
        ("opt-post-norm-projection", 2, UnevenBlocks, "160 inputs of layers.0.down.weight are packed"),
    ],
)
def test_groups_that_are_not_whole(name: str, n_devices: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LLM(DIRECTORY / name, tensor_parallel=n_devices, **options(name, "int4"))


def test_stages_have_the_tokens_of_one_to_the_last_bit() -> None:
    """With the products that a CPU has."""
    name = "llama-biases-yarn"
    tokens: list[list[list[int]]] = []
    for n_stages in (1, 2):
        with LLM(DIRECTORY / name, pipeline_parallel=n_stages, **options(name, "int8")) as llm:
            tokens.append([[*each.token_ids] for each in llm.generate(prompts_of(name), PARAMS)])
    assert tokens[0] == tokens[1]
