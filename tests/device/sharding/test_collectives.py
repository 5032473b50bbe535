"""A stage's devices communicate in two all-reduces per layer and nothing else (ORCA 4.1, Figure 6)."""

from collections import Counter
from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from bench.compiled.collectives import Collective, collectives, counts
from orca_jax.aot.compiled_stage import compile_stage
from orca_jax.config import ParallelConfig
from orca_jax.execution.sampling import TokenChooser
from orca_jax.families.model_config import ModelConfig
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.flat_batch import Sampler, SamplerArrays
from orca_jax.sharding.partition import StagePart, split_model
from tests.gpt_config import changed_config, gpt_config

N_STAGES = 3
OTHER = "post-norm, projected, no bias, own head"
MODEL = gpt_config(
    vocab_size=205, n_positions=64, hidden_size=64, n_layers=6, n_heads=4, ffn_size=128, vocab_multiple=4
)
MODELS = {
    "pre-norm": MODEL,
    OTHER: changed_config(
        MODEL,
        norm="post",
        final_norm=False,
        embedding_size=32,
        use_bias=False,
        tie_embeddings=False,
        activation="relu",
    ),
}
# By place in the model: what stands outside the layers. Each device has a part of the vocabulary, so a
# token's embedding is a sum, and the parts of the logits are set side by side.
OUTSIDE = {
    "first": {"all-reduce": 1},
    "middle": {},
    "last": {"all-gather": 1},
    "only": {"all-reduce": 1, "all-gather": 1},
}


def stage(name: str, where: str, layers_each: int, tensor: int) -> tuple[ModelConfig, StagePart]:
    n_stages = 1 if where == "only" else N_STAGES
    model = changed_config(MODELS[name], n_layers=n_stages * layers_each)
    parts = split_model(
        model, jax.devices(), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    )
    return model, parts[{"only": 0, "first": 0, "middle": 1, "last": -1}[where]]


@cache
def of_stage(name: str, where: str, layers_each: int, tensor: int, bucket: int) -> list[Collective]:
    """The collectives of the compiled forward program."""
    model, part = stage(name, where, layers_each, tensor)
    text = compile_stage(model, part, bucket, max_bs=32, n_blocks=64).program.as_text()
    assert text is not None
    return collectives(text)


CASES = [("pre-norm", 4, where, 8) for where in OUTSIDE]
CASES += [("pre-norm", 2, "only", 64), (OTHER, 2, "only", 8)]


@pytest.mark.parametrize(("name", "tensor", "where", "bucket"), CASES)
def test_a_layer_has_two_sums_and_nothing_else(name: str, tensor: int, where: str, bucket: int) -> None:
    one, two = (
        Counter(result.kind for result in of_stage(name, where, n_layers, tensor, bucket))
        for n_layers in (1, 2)
    )
    assert two - one == {"all-reduce": 2}
    assert not one - two
    assert one - Counter({"all-reduce": 2}) == OUTSIDE[where]


@pytest.mark.parametrize("where", OUTSIDE)
def test_one_device_needs_no_collectives(where: str) -> None:
    assert of_stage("pre-norm", where, 1, 1, 8) == []


def test_a_sum_is_of_the_hidden_array_and_no_more() -> None:
    bucket = 8
    sums = [result for result in of_stage("pre-norm", "middle", 1, 4, bucket) if result.kind == "all-reduce"]
    # The CPU sums in float32 what is bfloat16; a GPU does not.
    assert {result.n_bytes // (bucket * MODEL.hidden_size) for result in sums} <= {2, 4}


@pytest.mark.parametrize("native", [True, False])
def test_the_choice_of_a_token_needs_no_collective(native: bool) -> None:
    whole = split_model(MODEL, jax.devices(), ParallelConfig(tensor_parallel=4))[0].group.place()
    chooser = TokenChooser(MODEL.vocab_size, 64, whole, native=native)
    logits = jax.device_put(jnp.zeros((8, MODEL.vocab_size)), whole)
    rows = jax.device_put(jnp.zeros((len(SamplerArrays._fields), 8), jnp.int32), whole)
    words = jax.device_put(jnp.zeros((8, n_words(MODEL.vocab_size)), jnp.int32), whole)
    lowered = {
        sampler: chooser._choose.lower(logits, logits, rows, chooser.last_token, sampler=sampler)
        for sampler in get_args(Sampler)
    }
    lowered["adjust"] = chooser._adjust.lower(logits, rows, chooser._tables, chooser.last_token)
    lowered["allow"] = chooser._allow.lower(logits, words)
    lowered["logprobs"] = chooser._logprobs.lower(logits, rows, rows[0])
    for name, program in lowered.items():
        text = program.compile().as_text()
        assert text is not None and "ENTRY" in text
        assert not counts(text), name


def test_how_a_program_s_text_is_read() -> None:
    text = """
  %all-reduce-start.1 = bf16[32,12288]{1,0} all-reduce-start(%fusion.4), channel_id=1, to_apply=%add
  %all-reduce-done.1 = bf16[32,12288]{1,0} all-reduce-done(%all-reduce-start.1)
  %all-gather-start = (bf16[32,10]{0,1}, bf16[32,40]{0,1}) all-gather-start(%bitcast.129), dimensions={1}
  %all-gather-done = bf16[32,40]{0,1} all-gather-done(%all-gather-start)
  ROOT %all-reduce.7 = (f32[8]{0}, f32[4,2]{1,0}) all-reduce(%a, %b), to_apply=%add
  %permute = s32[] collective-permute(%p), source_target_pairs={{0,1}}
  %fusion = f32[8]{0} fusion(%all-reduce.7), kind=kLoop, metadata={op_name="all-gather(x)"}
"""
    assert collectives(text) == [
        Collective("all-reduce", 32 * 12288 * 2),
        Collective("all-gather", 32 * 40 * 2),
        Collective("all-reduce", 8 * 4 + 8 * 4),
        Collective("collective-permute", 4),
    ]
