"""The model's last layer: after queries, keys and values it computes only each row's last token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_softmax

from orca_jax.config import Attention, ParallelConfig, ServingConfig
from orca_jax.execution.attention_paths import Kernel, PureJax
from orca_jax.execution.host_buffer import HostBuffer
from orca_jax.execution.matmul_backend import Products
from orca_jax.execution.stage import Stage
from orca_jax.families.parameters import parameter_shapes, parameter_table
from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, TokenPrograms
from orca_jax.model import reference
from orca_jax.model.attention import attention_work, split_attention
from orca_jax.model.context import Attend, Iteration, Tokens
from orca_jax.model.kv_cache import LayerCache, cache_shape
from orca_jax.model.layers import Matmul, matmul
from orca_jax.model.transformer import Transformer
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from tests.device.harness import harness
from tests.device.native.native_form import needs_native
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=67, n_positions=320, hidden_size=32, n_layers=2, n_heads=2, ffn_size=48, vocab_multiple=2
)


def parameters() -> dict[str, jax.Array]:
    """Random parameters from NumPy, which compiles nothing."""
    rng = np.random.default_rng(3)
    return {
        name: jnp.asarray(
            np.full(one.shape, float(one.initial == "ones"), "f4")
            if one.initial != "normal"
            else rng.normal(0, 0.16, one.shape).astype("f4")
        )
        for name, one in parameter_table(MODEL).items()
    }


class RecordedProducts(Products):
    """XLA's products, recording the number of tokens of each trace."""

    def bind(self, n_tokens: jax.Array | None) -> Matmul:
        def product(x: jax.Array, weight: jax.Array, n_tokens: jax.Array | None) -> jax.Array:
            traced.append(x.shape[0])
            return matmul(x, weight)

        return Matmul(product)


traced: list[int] = []


@pytest.mark.parametrize(
    ("bucket", "of_layers", "of_the_last", "of_the_head"),
    [(32, [32] * 4, [32, 4, 4, 4], [4]), (5, [5] * 4, [5, 4, 4, 4], [4]), (4, [4] * 4, [], [4])],
)
def test_after_keys_and_values_it_computes_one_token_per_row(
    bucket: int, of_layers: list[int], of_the_last: list[int], of_the_head: list[int]
) -> None:
    """Equal layers are traced once; with one token per row all layers are equal."""
    (part,) = split_model(MODEL, jax.devices())

    def like(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=part.group.place())

    shapes = {name: like(*shape) for name, shape in parameter_shapes(MODEL).items()}
    products = RecordedProducts(native=False)
    stage = Stage(MODEL, shapes, part, attention=PureJax(follow_lengths=True), products=products)
    layout = FlatLayout(bucket, 4, 10)
    cache = like(*cache_shape(MODEL.attention, n_blocks=20, block_size=8))
    caches = [LayerCache(cache, cache)] * MODEL.n_layers
    buffer = like(stage.host_buffer.size(layout), dtype=jnp.int32)
    traced.clear()
    stage.forward.lower(stage.weights, caches, like(8, dtype=jnp.int32), buffer, layout=layout)
    assert traced == [*of_layers, *of_the_last, *of_the_head]


def test_any_tokens_of_a_row_can_be_evaluated() -> None:
    n_tokens, block_size, at = 21, 8, np.array([20, 3, 4, 0, 20], np.int32)
    p = parameters()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, MODEL.vocab_size, n_tokens))

    def attend_to(row_start: list[int], kv_length: list[int], n: int) -> Attend:
        start, lengths = jnp.array(row_start), jnp.array(kv_length)
        work = attention_work(start, lengths, n, follow_lengths=True)
        table = jnp.tile(jnp.arange(3), (len(kv_length), 1))
        attend = partial(split_attention, follow_lengths=True)
        return lambda q, cache, own, *_: attend(q[:, : own.group], cache, table, start, lengths, work)

    model = Transformer(MODEL, p)

    @jax.jit
    def evaluate() -> tuple[jax.Array, jax.Array]:
        """Score tokens in the forward pass, and afterwards from the last layer's input and cache."""
        empty = jnp.zeros(cache_shape(MODEL.attention, n_blocks=3, block_size=block_size))
        caches = [LayerCache(empty, empty)] * MODEL.n_layers
        position = jnp.arange(n_tokens)
        attend = attend_to([0, n_tokens], [n_tokens], n_tokens)
        singly = attend_to([*range(len(at) + 1)], (at + 1).tolist(), len(at))
        every, wanted = Tokens(attend), Tokens(singly, at=jnp.asarray(at))
        x = model.embed(tokens, position)
        x, before, caches, *_ = model.through(x, caches, Iteration(position, position, every, wanted))
        later = model.last_layer(before, caches[-1], Iteration(position, None, every)).x
        return model.logits(x), model.logits(later)

    expected = np.asarray(jax.jit(partial(reference.forward, MODEL))(p, tokens))
    at_once, later = evaluate()
    np.testing.assert_allclose(at_once, expected[at], atol=2e-4)
    np.testing.assert_allclose(later, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("attention", "tensor", "n_stages"),
    [
        pytest.param("follow_lengths", 2, 1, marks=pytest.mark.long),
        pytest.param("native", 1, 2, marks=needs_native),
    ],
)
def test_a_long_prompt_is_scored_in_parts(attention: Attention, tensor: int, n_stages: int) -> None:
    """Other prompts are scored in the same batch."""
    serving = ServingConfig(max_batch_size=3, n_slots=1024, max_batch_tokens=320, block_size=8)
    parts = split_model(
        MODEL, jax.devices(), ParallelConfig(tensor_parallel=tensor, pipeline_parallel=n_stages)
    )
    p = parameters()
    house = harness(MODEL, p, serving, buckets=(320,), attention=attention, parts=parts)
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=2)
    requests = [
        Request(str(n), tuple(rng.integers(0, 67, n).tolist()), n + 1, sampling, seed=0) for n in (290, 29, 1)
    ]
    house.run(requests)
    forward = jax.jit(partial(reference.forward, MODEL))
    for request in requests:
        prompt = np.array(request.prompt_ids)
        padded = np.resize(prompt, 290)
        exact = np.asarray(log_softmax(forward(p, jnp.asarray(padded)), axis=-1))
        assert request.prompt_logprobs is not None
        scored = [(one.token_id, one.logprob, one.top[0][1]) for one in request.prompt_logprobs]
        assert [token for token, _, _ in scored] == prompt[1:].tolist()
        n = len(prompt) - 1
        np.testing.assert_allclose([own for _, own, _ in scored], exact[range(n), prompt[1:]], atol=3e-4)
        np.testing.assert_allclose([best for _, _, best in scored], exact[:n].max(axis=1), atol=3e-4)


def test_the_kernels_list_for_the_last_layer_has_one_token_per_row() -> None:
    """Rows of 1, 5 and 2 tokens, padded to 16 tokens and 4 rows."""
    kernel = Kernel(n_kv_heads=2, group=1, n_cores=3, block_size=8, windows=(None, 16))
    layout, last = FlatLayout(16, 4, 10), FlatLayout(4, 4, 10)
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    arrays.row_start[:] = [0, 1, 6, 8, 8]
    arrays.kv_length[:] = [40, 5, 30, 0]
    flat = FlatBatch(layout, buffer, arrays, 8, 3, TokenPrograms())
    decodes = arrays._replace(row_start=np.array([0, 1, 2, 3, 3], np.int32))
    ofs = {stage: HostBuffer(kernel, stage).fill(flat) for stage in (False, True)}
    assert {stage: len(words) for stage, words in ofs.items()} == {
        stage: HostBuffer(kernel, stage).size(layout) for stage in (False, True)
    }
    of_all = np.concatenate((buffer, kernel.words(layout, arrays)))
    assert np.array_equal(ofs[False], of_all)
    assert np.array_equal(ofs[True][: len(of_all)], of_all)
    assert np.array_equal(ofs[True][-kernel.n_words(last) :], kernel.words(last, decodes))
    assert (len(ofs[True]) - kernel.n_words(last)) % 64 == 0  # it begins where a kernel can take it
    assert HostBuffer(kernel, last=True).size(last) == last.size + kernel.n_words(last)
