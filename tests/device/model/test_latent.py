"""Latent attention in the engine, with its compressed cache, against expanded keys and values."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.compiled.collectives import collectives
from orca_jax.aot.compiled_stage import compile_stage
from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig
from orca_jax.families import attention_config
from orca_jax.families.attention_config import Latent, Scores
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.parameters import parameter_table
from orca_jax.families.rotary import Rotary, Scaling
from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.kv_cache import LayerCache, as_numbers, copy_blocks, dtype_on_cpu
from orca_jax.planning.stage_memory import slot_bytes
from orca_jax.request.request import Request
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness, single_worker
from tests.device.model.any_model import SERVING, any_model, check, requests
from tests.device.model.drawn_weights import drawn
from tests.device.model.latent_models import NORM, SIGMOID, dense, latent_model
from tests.device.model.ragged import ragged
from tests.device.native.native_form import needs_native

YARN = Scaling(kind="yarn", factor=4.0, original_positions=10, mscale=1.0, mscale_all_dim=0.7)
MODEL = latent_model(
    Latent(rank=12, rotary_size=4, plain_size=6, value_size=5, query_rank=10),
    4,
    [dense(), dense(8, SIGMOID)],
    Rotary(size=4, base=500.0, interleaved=True, scaling=YARN),
    scores=Scores(scale=0.4),
)


@pytest.fixture(scope="module", autouse=True)
def short_prompts() -> Iterator[None]:
    """Let rows of two tokens take the plain form, because these prompts are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_config, "FEWEST_PLAIN", 2)
        yield


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    size = st.integers(1, 9)
    rotary_size = 2 * draw(st.integers(1, 4))
    latent = Latent(
        rank=draw(st.integers(1, 20)),
        rotary_size=rotary_size,
        plain_size=draw(size),
        value_size=draw(size),
        query_rank=draw(st.none() | size),
        norm=draw(st.sampled_from([NORM, Norm(kind="rms_norm", eps=1e-6)])),
    )
    kinds = draw(st.lists(st.sampled_from([dense(), dense(12, SIGMOID)]), min_size=1, max_size=3))
    scaling = draw(st.sampled_from([None, YARN, Scaling(kind="linear", factor=2.0)]))
    return latent_model(
        latent,
        draw(st.integers(1, 6)),
        kinds,
        Rotary(size=rotary_size, base=500.0, interleaved=draw(st.booleans()), scaling=scaling),
        scores=Scores(scale=draw(st.sampled_from([None, 0.5]))),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
    )


@settings(any_model, max_examples=1)
@given(model=models(), seed=st.integers(0, 99))
def test_the_tokens_are_the_references(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.long
@pytest.mark.timeout(1500)
@settings(any_model, max_examples=12)
@given(model=models(), seed=st.integers(0, 9999))
def test_the_tokens_are_the_references_in_many_models(model: ModelConfig, seed: int) -> None:
    check(model, seed)


@pytest.mark.parametrize(
    ("n_stages", "tensor"), [(2, 2), *(pytest.param(1, n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_heads_are_split_over_devices_and_each_has_all_compressed_vectors(n_stages: int, tensor: int) -> None:
    model = MODEL.for_devices(tensor)
    kept = drawn(MODEL, 6)
    table = parameter_table(model)
    padded = {
        name: jnp.pad(
            value, [(0, new - old) for new, old in zip(table[name].shape, value.shape, strict=True)]
        )
        for name, value in kept.items()
    }
    parallel = ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    parts = split_model(model, jax.devices(), parallel)
    asked, arrivals = requests()
    harness(model, padded, SERVING, buckets=(48,), parts=parts).run(asked, arrivals)
    reference = GreedyReference(MODEL, kept)
    assert sum(reference.sure(request) for request in asked) > 0.8 * sum(len(r.output_ids) for r in asked)
    width = 12 + 4
    assert slot_bytes(model, range(2), tensor, 4) == slot_bytes(MODEL, range(2), 1, 4) == 2 * width * 4
    shares = {
        name: table[name].local_shape(tensor) for name in ("layers.0.q_b.weight", "layers.0.kv_a.weight")
    }
    assert shares == {"layers.0.q_b.weight": (4 // tensor * 10, 10), "layers.0.kv_a.weight": (width, 20)}


@needs_native
def test_the_attention_in_c_has_the_same_tokens() -> None:
    latent = Latent(rank=32, rotary_size=16, plain_size=6, value_size=5)
    model = latent_model(latent, 3, [dense(), dense(8, SIGMOID)])
    parameters = drawn(model, 3)
    worker = single_worker(model, parameters, SERVING, n_rows=8)
    assert worker.attention.kind == "native"
    asked, arrivals = requests()
    harness(model, parameters, SERVING, workers=[worker]).run(asked, arrivals)
    reference = GreedyReference(model, parameters)
    assert sum(reference.sure(request) for request in asked) > 0.8 * sum(len(r.output_ids) for r in asked)


def test_random_weights_do_not_depend_on_the_devices() -> None:
    (whole,) = split_model(MODEL, jax.devices())
    split = replace(MODEL.for_devices(2), vocab_multiple=1)
    (part,) = split_model(split, jax.devices(), ParallelConfig(tensor_parallel=2))
    dtype = jnp.dtype("float32")
    one = random_parameters(MODEL, 3, dtype, whole.placement(MODEL))
    placement = {k: v for k, v in part.placement(split).items() if "layers" in k}
    for name, value in random_parameters(split, 3, dtype, placement).items():
        np.testing.assert_array_equal(value, one[name])


@pytest.mark.long
def test_a_layer_has_two_sums_and_nothing_else() -> None:
    def found(n_layers: int) -> Counter[str]:
        model = replace(MODEL, layers=MODEL.layers[1:] * n_layers).for_devices(4)
        (part,) = split_model(model, jax.devices(), ParallelConfig(tensor_parallel=4))
        text = compile_stage(model, part, 8, max_bs=8, n_blocks=16).program.as_text()
        assert text is not None
        return Counter(each.kind for each in collectives(text))

    assert found(2) - found(1) == {"all-reduce": 2} and not found(1) - found(2)


@pytest.mark.parametrize("seed", [1, 2])
def test_pieces_prefixes_and_preemption_keep_the_tokens(seed: int) -> None:
    """The engine has few slots, chunked prefill, and a prefix cache."""
    parameters = drawn(MODEL, 4)
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 53, 21).tolist()
    prompts = [[*begin, *rng.integers(0, 53, n).tolist()] for n in (1, 5, 1, 9, 3)] + [begin[:16], begin]

    def asked() -> list[Request]:
        return [greedy_request(str(i), prompt, 10) for i, prompt in enumerate(prompts)]

    scheduling = SchedulingConfig(prefill_tokens=7)
    serving = ServingConfig(
        max_batch_size=4, n_slots=72, max_batch_tokens=48, block_size=8, scheduling=scheduling
    )
    engine = harness(MODEL, parameters, serving, buckets=(4, 48))
    run = asked()
    engine.run(run, arrivals=[0, 2, 2, 3, 3, 9, 20])
    assert engine.scheduler.n_preemptions > 0
    assert any(request.n_cached > 0 for request in run)
    reference = GreedyReference(MODEL, parameters)
    assert sum(reference.sure(request) for request in run) > 0.8 * 10 * len(run)


def test_the_cache_has_one_vector_per_token() -> None:
    worker = single_worker(MODEL, drawn(MODEL, 0), SERVING, n_rows=8)
    arrays = jax.tree.leaves(worker._caches)
    assert {array.shape[1:] for array in arrays} == {(1, SERVING.block_size, 12 + 4)}
    assert len(arrays) == MODEL.n_layers
    assert slot_bytes(MODEL, range(2), 1, 2) == 2 * (12 + 4) * 2


@pytest.mark.parametrize("follow_lengths", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_as_the_first_elements_of_keys(dtype: Any, follow_lengths: bool) -> None:
    """The result is the same as with separate values; slots that no row may see hold NaN."""
    case = ragged(3, [(1, 40), (5, 5), (1, 1), (20, 33)], n_heads=6, n_kv_heads=2, head_size=24, n_padding=3)
    q = jnp.asarray(case.q, dtype).reshape(len(case.q), 2, 3, 24).swapaxes(1, 2)
    keys = jnp.asarray(case.k_cache, dtype)
    stored = jax.lax.bitcast_convert_type(keys, dtype_on_cpu(dtype)) if dtype == jnp.bfloat16 else keys
    table, row_start, kv_length = map(jnp.asarray, (case.block_table, case.row_start, case.kv_length))
    work = attention_work(row_start, kv_length, len(q), follow_lengths=follow_lengths)

    def attended(cache: LayerCache, value_size: int | None) -> jax.Array:
        rows = (table, row_start, kv_length, work)
        return split_attention(q, cache, *rows, follow_lengths=follow_lengths, value_size=value_size)

    whole = attended(LayerCache(keys, keys), None)
    found = attended(LayerCache(stored, None), 10)
    assert found.shape == (len(q), 3, 2, 10)
    np.testing.assert_allclose(found.astype("f4"), whole[..., :10].astype("f4"), rtol=1e-5, atol=1e-6)


def test_blocks_are_copied_in_a_cache_without_values() -> None:
    keys = jnp.arange(4 * 2 * 3, dtype=jnp.float32).reshape(4, 1, 2, 3)
    (copied,) = copy_blocks([LayerCache(keys, None)], jnp.array([[0, 2], [1, 4]], jnp.int32))
    assert copied.values is None
    np.testing.assert_array_equal(as_numbers(copied.keys), keys.at[2].set(keys[0]))
