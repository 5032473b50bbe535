"""Levanter's own model, served and given its own weights: the log-probabilities are Levanter's.

Skipped where Levanter is not installed: `pip install --pre marin-levanter` beside the engine, on Python 3.12.
"""

# Levanter is not installed where the project is checked.
# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.rollout import Rollout

hax: Any = pytest.importorskip("haliax", reason="haliax is not installed")
eqx: Any = pytest.importorskip("equinox")
pytest.importorskip("levanter", reason="levanter (marin-levanter) is not installed")
attention: Any = pytest.importorskip("levanter.layers.attention")
checkpoint: Any = pytest.importorskip("levanter.checkpoint")
llama: Any = pytest.importorskip("levanter.models.llama")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Levanter and its libraries

LENGTH, VOCAB = 32, 96
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 10_000,
}  # fmt: skip
PARAMS = SamplingParams(n=4, max_tokens=12, temperature=1.0, ignore_eos=True, logprobs=0, seed=3)
PROMPTS = [[1, 2, 3, 4, 5], [7], [*range(20, 36)]]


def test_ten_pushes_of_levanters_model(tmp_path: Path) -> None:
    """Within 1e-4 after each; nothing is compiled after the first."""
    config = llama.LlamaConfig(
        hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=LENGTH,
        head_dim=8, layer_norm_epsilon=1e-5, gradient_checkpointing=False,
        attn_backend=attention.AttentionBackend.VANILLA,
    )  # fmt: skip
    rng, position = np.random.default_rng(0), hax.Axis("position", LENGTH)

    @eqx.filter_jit
    def log_probabilities(model: Any, tokens: jax.Array) -> jax.Array:
        batch = hax.Axis("batch", len(tokens))
        logits = model(hax.named(tokens, (batch, position)), attention.AttentionMask.causal())
        return jax.nn.log_softmax(logits.rearrange(("batch", "position", "vocab")).array)

    def changed(model: Any) -> Any:
        arrays, rest = eqx.partition(model, eqx.is_array)
        noise = jax.tree.map(lambda a: a + jnp.asarray(rng.normal(0, 0.1, a.shape), a.dtype), arrays)
        return eqx.combine(noise, rest)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = changed(config.model_type.init(hax.Axis("vocab", VOCAB), config, key=jax.random.PRNGKey(0)))
        checkpoint.save_checkpoint({"model": model}, 1, str(tmp_path / "step-1"), is_temporary=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    compiled = list[int]()
    sizes: dict[str, Any] = {"max_batch_size": 16, "max_batch_tokens": 16, "n_slots": 1024}
    with LLM(tmp_path, **sizes, compile_ahead=True) as llm, Rollout(llm) as rollout:
        for _ in range(11):
            for prompt in PROMPTS:
                rollout.submit(prompt, PARAMS)
            samples = [sample for group in rollout.take(len(PROMPTS)) for sample in group.samples]
            tokens = np.zeros((len(samples), LENGTH), np.int32)
            for row, sample in zip(tokens, samples, strict=True):
                row[: len(sample.prompt_ids) + PARAMS.max_tokens] = (*sample.prompt_ids, *sample.token_ids)
            with jax.set_mesh(mesh):
                exact = np.asarray(log_probabilities(model, jnp.asarray(tokens)))
                model = changed(model)
            for row, sample in zip(exact, samples, strict=True):
                assert sample.logprobs is not None
                theirs = row[len(sample.prompt_ids) - 1 :][range(PARAMS.max_tokens), sample.token_ids]
                np.testing.assert_allclose(sample.logprobs, theirs, atol=1e-4)
            rollout.update(model, layout="levanter")
            compiled.append(llm.compiles.programs)
        assert llm.weights_version == 11
    assert len({*compiled[1:]}) == 1
