"""The golden beam searches' scores follow from the reference's logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.model import reference
from tests.device.model.golden_beams import NAMES, Search, load_beams
from tests.device.model.golden_encoders import quick_and_long

LONGEST = 40
QUICK = ("gpt2-tied-gelu-new", "qwen2-tied", "t5-relu", "bart-gelu")


@pytest.mark.matrix(but=["gpt2-tied-gelu-new", "t5-relu"])
@pytest.mark.parametrize("name", quick_and_long(NAMES, QUICK))
def test_scores_equal_the_references(name: str) -> None:
    golden = load_beams(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config
    forced = {0: model.forced_bos_token_id, golden.max_output - 1: model.forced_eos_token_id}
    forward = jax.jit(reference.forward, static_argnums=0)
    seen = dict[tuple[tuple[int, ...], ...], float]()

    def log_probability(search: Search, tokens: tuple[int, ...]) -> float:
        key = (search.encoder_ids, search.prompt, tokens)
        if key not in seen:
            ids = np.zeros(LONGEST, np.int32)  # one length, one program; what follows changes nothing
            ids[: len(search.prompt + tokens)] = search.prompt + tokens
            own = np.full(LONGEST, -1, np.int32)
            own[: len(search.encoder_ids)] = search.encoder_ids
            given = (jnp.array(ids), jnp.array(own)) if model.encoder else (jnp.array(ids),)
            logits = forward(model, checkpoint.parameters, *given)
            first = len(search.prompt) - 1
            log_probs = jax.nn.log_softmax(logits[first : first + len(tokens)])
            chosen = [i for i in range(len(tokens)) if forced.get(i) is None]  # what is forced is certain
            seen[key] = float(log_probs[np.array(chosen), np.array(tokens)[chosen]].sum())
        return seen[key]

    for search in golden.searches:
        expected = [
            log_probability(search, tokens) / len(tokens) ** search.length_penalty for tokens in search.tokens
        ]
        np.testing.assert_allclose(search.scores, expected, rtol=0, atol=1e-4)
        assert list(search.scores) == sorted(search.scores, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_settings_and_ends_differ(name: str) -> None:
    golden = load_beams(name)
    settings = {(one.n_beams, one.length_penalty, one.early_stopping) for one in golden.searches}
    assert len(settings) == 2 * 3 * 3
    results = {setting: [] for setting in settings}
    for one in golden.searches:
        results[one.n_beams, one.length_penalty, one.early_stopping].append(one.tokens)
        assert len(one.tokens) == len(one.scores) == one.n_beams
        assert len(set(one.tokens)) == one.n_beams
    assert len({tuple(found) for found in results.values()}) >= 6
    every = [tokens for one in golden.searches for tokens in one.tokens]
    ended = sum(len(tokens) < golden.max_output for tokens in every) / len(every)
    assert 0.05 < ended < 0.95
    for tokens in every:
        assert not set(tokens[:-1]) & set(golden.eos_token_ids)
        assert len(tokens) == golden.max_output or tokens[-1] in golden.eos_token_ids
