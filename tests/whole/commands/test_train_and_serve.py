"""A model trained in Flax and saved with Orbax is served as it is, with the training module's tokens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import train_and_serve
from examples.train_and_serve import LENGTH, TinyGPT, save, train
from orca_jax import LLM, SamplingParams

PROMPTS = [b"def ", b"import jax", b"the tokens are", b"\n"]
N_TOKENS = 24


def greedy(model: TinyGPT, prompt: bytes) -> tuple[list[int], list[float]]:
    """The module's greedy tokens, computed without a cache, and each one's distance from the second best."""
    forward = nnx.jit(lambda model, ids: model(ids))
    window, n = np.zeros((1, LENGTH), np.int32), len(prompt)
    window[0, :n] = list(prompt)
    gaps: list[float] = []
    for i in range(n, n + N_TOKENS):
        logits = np.asarray(forward(model, jnp.asarray(window)))[0, i - 1]
        second, best = np.sort(logits)[-2:]
        gaps.append(float(best - second))
        window[0, i] = logits.argmax()
    return window[0, n : n + N_TOKENS].tolist(), gaps


@pytest.mark.long
def test_what_is_trained_is_what_is_served(tmp_path: Path) -> None:
    model, optimizer = train(Path(train_and_serve.__file__).read_bytes(), 12)
    save(tmp_path / "run", model, optimizer, 12)
    with LLM(tmp_path / "run", max_batch_size=4) as llm:
        params = SamplingParams(max_tokens=N_TOKENS, temperature=0)
        results = llm.generate([list(prompt) for prompt in PROMPTS], params)
    n_compared = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected, gaps = greedy(model, prompt)
        sure = next((i for i, gap in enumerate(gaps) if gap < 1e-3), N_TOKENS)
        assert result.token_ids[:sure] == expected[:sure]
        n_compared += sure
    assert n_compared > len(PROMPTS) * N_TOKENS // 2


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    train_and_serve.main(["--steps", "2", "--prompt", "def "])
    assert "loss" in capsys.readouterr().out
