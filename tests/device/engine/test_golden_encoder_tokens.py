"""Hugging Face transformers' greedy tokens of models with an encoder, alone and mixed with other requests."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ServingConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import Request
from orca_jax.service.prepared_params import RuleMaker
from tests.device.harness import greedy_request, harness
from tests.device.model.golden_encoders import NAMES, load_golden_encoder

N_OUTPUT, MAX_TOKENS = 16, 72  # 72: the longest input, and the tokens of a decoder after a loss
QUICK = ("t5-gated",)  # test_encoder_requests.py has one of BART's kind
# The first shape of each other family; all shapes' logits are compared in tests/device/model.
LONG = [*{name.split("-")[0]: name for name in reversed(NAMES)}.values()]
# Programs of one size for each phase, or of all sizes and with iterations that mix the phases.
CASES = [
    *(pytest.param(name, 32, True) for name in QUICK),
    *(pytest.param(name, 32, True, marks=pytest.mark.long) for name in LONG),
    *(pytest.param("t5-gated", n, False, marks=pytest.mark.long) for n in (1, 3, 32)),
]


def short(model: ModelConfig) -> ModelConfig:
    """The model with as few positions as the test needs; learned positions cannot be reduced."""
    assert model.encoder is not None
    n = {"n_positions": N_OUTPUT + 8}
    return model if model.positions else replace(model, **n, encoder=replace(model.encoder, n_positions=64))


@pytest.mark.parametrize(("name", "max_bs", "deterministic"), CASES)
def test_engine_gives_the_same_tokens(name: str, max_bs: int, deterministic: bool) -> None:
    golden = load_golden_encoder(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = short(checkpoint.config)
    rules = RuleMaker(model, None).rules(greedy_request("", (0,), N_OUTPUT).sampling)
    start = model.decoder_start_token_id
    assert start is not None and model.encoder is not None

    def request(i: int) -> Request:
        plain = greedy_request(str(i), (start,), N_OUTPUT)
        return replace(plain, encoder_ids=golden.inputs[i], constraint=rules.constraint())

    n_slots = max_bs * 2 * max(model.n_positions + 16, model.encoder.n_positions + 16)
    n_tokens = max(MAX_TOKENS, model.n_positions) if deterministic else MAX_TOKENS
    serving = ServingConfig(
        max_batch_size=max_bs, n_slots=n_slots, max_batch_tokens=n_tokens, deterministic=deterministic
    )
    engine = harness(model, checkpoint.parameters, serving)
    numbers = range(len(golden.inputs))
    outputs = engine.run([request(i) for i in numbers], [i // 3 for i in numbers])
    alone = [engine.run([request(i)]) for i in numbers[::6]]
    for tokens_of in [outputs, *alone]:
        for key, tokens in tokens_of.items():
            sure = golden.sure(int(key))
            assert tuple(tokens[: len(sure)]) == sure, key
