"""An LLM with a draft model: the options, new weights of either model, sleep, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, DifferentTokenizer, TensorMismatch
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch import local_draft
from orca_jax.launch.replay_recording import replay
from tests.device.checkpoint.tiny_checkpoint import gpt2_tensors, write_checkpoint
from tests.whole.training.weights import CONFIG, PROMPTS, SIZES, arrays, reference_tokens, tokens


@pytest.fixture(autouse=True)
def _free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside so small a model the host's work is most of the time: its drafts would never be worth it."""
    monkeypatch.setattr(
        local_draft, "draft_costs", lambda sizes, *_, **__: [0.0] * len(serving_buckets(sizes))
    )


def of_draft(directory: Path) -> dict[str, np.ndarray]:
    return {f"draft.{name}": value for name, value in arrays(directory).items()}


def test_tokens_over_new_weights_and_sleep(old: Path, new: Path) -> None:
    """The draft model is right where both have the same weights, and the tokens are always the model's."""
    expected = {directory: reference_tokens(directory) for directory in (old, new)}
    options: dict[str, Any] = SIZES | {"max_batch_size": 16, "max_batch_tokens": 32}
    with LLM(old, speculative=f"draft:{new}", **options) as llm:
        made = llm.service.speculation
        assert made is not None

        def right(served: Path) -> float:
            """The fraction of right drafts."""
            n_right, n_compared = made.n_right, made.n_compared
            assert tokens(llm) == expected[served]
            assert made.n_compared - n_compared > 3
            return (made.n_right - n_right) / (made.n_compared - n_compared)

        assert right(old) < 0.5
        llm.update_weights({**arrays(old), **of_draft(old)})
        assert right(old) == 1.0
        llm.sleep(2)
        llm.wake_up()
        assert right(old) == 1.0
        llm.update_weights(new)
        assert right(new) < 0.5
        with pytest.raises(TensorMismatch, match="missing"):
            llm.update_weights({**arrays(old), "draft.embedding": np.zeros(3, np.float32)})
        assert tokens(llm) == expected[new]


@pytest.mark.matrix
def test_a_recording_is_repeated_with_its_draft_model(old: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = SIZES | {"max_batch_size": 16, "max_batch_tokens": 32}
    with LLM(old, speculative=f"draft:{old}", record=tmp_path / "recording", **options) as llm:
        assert tokens(llm) == reference_tokens(old)
        assert llm.service.speculation is not None and llm.service.speculation.n_accepted > 40
    report = replay(tmp_path / "recording")
    assert report.same and report.n_outputs == len(PROMPTS)


def test_what_cannot_draft_is_refused(old: Path, tmp_path: Path) -> None:
    larger = CONFIG | {"vocab_size": 261}
    other = write_checkpoint(tmp_path / "other", larger, gpt2_tensors(larger))
    with pytest.raises(DifferentTokenizer, match=r"has 261 tokens, and .* has 260; a draft model must have"):
        LLM(old, speculative=f"draft:{other}", **SIZES)
    with pytest.raises(ConfigError, match="the draft model t5-small has an encoder"):
        LLM("t5-small", load_format="dummy", speculative="draft:t5-small")
    with pytest.raises(ConfigError, match="a draft model does not work with workers or worker_processes yet"):
        EngineConfig(worker_processes=True, speculative="draft:some/model")
    with pytest.raises(ConfigError, match="speculative is 'draft:', without a model"):
        EngineConfig(speculative="draft:")
    with pytest.raises(ConfigError, match="a model of your own cannot draft yet"):
        LLM(old, speculative="draft:package.file:make", **SIZES)
