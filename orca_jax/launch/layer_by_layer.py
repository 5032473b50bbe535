# pyright: standard
"""Composition: a model's layers as an engine runs them, each in a stage of its own, with all states seen."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from orca_jax.config import EngineConfig, ParallelConfig, ServingConfig
from orca_jax.errors import ConfigError, UnsupportedModel
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.execution.stage import Last
from orca_jax.execution.worker import Worker
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.flat_batch import DECODE_CONTEXTS, BatchSizes
from orca_jax.iteration.message import BIAS, SAMPLED, ControlMessage, neutral_sampling
from orca_jax.launch.loaded_engine import load_stages
from orca_jax.model.transformer import Transformer
from orca_jax.model_files.found_model import FoundModel
from orca_jax.planning.sizes import engine_shape
from orca_jax.planning.stage_layers import check_split
from orca_jax.sharding.device_group import DeviceGroup, default_dtype
from orca_jax.sharding.partition import StagePart
from orca_jax.user_model.decoder import UserDecoder, UserParameters

_BLOCK = ServingConfig().block_size


class LayerByLayer:
    """The layers of the model `found`, on JAX's first device, for one sequence of tokens [T].

    Each layer runs in the program of an engine's stage, with the engine's kernels and keys and values in
    blocks. Raises ConfigError or a CheckpointError; UnsupportedModel where layers do not stand alone.
    """

    def __init__(self, found: FoundModel, config: EngineConfig, token_ids: npt.NDArray[np.int32]) -> None:
        keep_compiled_programs(config.compile_cache)
        model, device = found.config, jax.devices()[0]
        n = len(token_ids)
        if not 2 <= n <= model.n_positions:
            raise ConfigError(f"there are {n} tokens; the model takes 2 to {model.n_positions} of them")
        if token_ids.min() < 0 or token_ids.max() >= model.vocab_size:
            raise ConfigError(f"a token is not in the vocabulary, whose ids are 0 to {model.vocab_size - 1}")
        if model.encoder is not None or model.only_pools:
            raise UnsupportedModel("layers are compared one by one in decoders alone")
        try:
            check_split(model, ParallelConfig(pipeline_parallel=model.n_layers))
        except ConfigError as error:
            raise UnsupportedModel(f"this model's layers cannot be run one by one: {error}") from error
        if device.platform == "cpu":
            keep_large_buffers()
        self.n_layers = model.n_layers
        self.dtype = jnp.dtype(config.dtype or default_dtype(device))
        by_user = found.user_model is not None
        # No stage is the first, since a layer may be given any input. Only a user's last layer is a last
        # stage: a family's would compute its end for one token alone.
        parts = [
            StagePart(
                range(i, i + 1),
                DeviceGroup((device,)),
                first=False,
                last=by_user and i == model.n_layers - 1,
            )
            for i in range(model.n_layers)
        ]
        model, parameters = load_stages(found, parts, config, self.dtype)
        serving = ServingConfig(
            max_batch_size=1, max_batch_tokens=n, n_slots=-(-n // _BLOCK) * _BLOCK, block_size=_BLOCK
        )
        shape = engine_shape(model, serving, n_workers=1)
        self._workers = [
            Worker(model, own, shape, part, attention=config.attention)
            for own, part in zip(parameters, parts, strict=True)
        ]
        self._message = _prompt(token_ids)
        sizes = BatchSizes(shape, shape.buckets, DECODE_CONTEXTS[self._workers[0].attention.kind])
        self._flat = sizes.lay_out(self._message)
        products = choose_products(device, self.dtype)
        self._product = products.bind(jnp.asarray([n], jnp.int32))
        self._token_ids = jnp.asarray(token_ids)

        def whole(i: int) -> Transformer | UserDecoder:
            own = parameters[i]
            return (
                own.decoder if isinstance(own, UserParameters) else Transformer(model, own, parts[i].layers)
            )

        # A user's last stage has the model around the layers too.
        self._first, self._last = whole(-1 if by_user else 0), whole(-1)
        self.has_final_norm = not by_user and model.final_norm is not None

    def embedded(self) -> jax.Array:
        """The first layer's input, [T, H]."""
        positions = jnp.arange(len(self._token_ids), dtype=jnp.int32)
        return _run(self._first, partial(_embed, product=self._product), self._token_ids, positions)

    def layer(self, i: int, x: npt.ArrayLike) -> jax.Array:
        """The output of layer `i`, [T, H], for its input x [T, H]."""
        worker, n = self._workers[i], len(self._token_ids)
        place = worker.hidden_like(self._flat.layout.n_tokens)
        padded = jnp.zeros(place.shape, place.dtype).at[:n].set(jnp.asarray(x).astype(place.dtype))
        worker.prepare(self._message)
        out = worker.forward(self._flat, jax.device_put(padded, place.sharding))
        return (out.hidden if isinstance(out, Last) else out)[:n]

    def final_states(self, x: npt.ArrayLike) -> jax.Array:
        """The final norm of the last layer's output, [T, H]."""
        return _run(self._last, partial(_final, product=self._product), self._as_state(x))

    def logits(self, x: npt.ArrayLike, *, normed: bool = False) -> jax.Array:
        """The logits [T, V] from the last layer's output, or from its final norm if it is `normed`."""
        head = partial(_logits, product=self._product, normed=normed)
        return _run(self._last, head, self._as_state(x))

    def _as_state(self, x: npt.ArrayLike) -> jax.Array:
        return jnp.asarray(x).astype(self.dtype)


def _run(model: nnx.Module, function: Any, *arrays: jax.Array) -> jax.Array:
    graph, weights = nnx.split(model)
    return jax.jit(lambda weights, *arrays: function(nnx.merge(graph, weights), *arrays))(weights, *arrays)


def _embed(model: Any, token_ids: jax.Array, positions: jax.Array, product: Any) -> jax.Array:
    return model.embed(token_ids, positions, product=product)


def _final(model: Any, x: jax.Array, product: Any) -> jax.Array:
    return model.final_states(x, product)


def _logits(model: Any, x: jax.Array, product: Any, *, normed: bool) -> jax.Array:
    if normed:
        model.final_norm = None  # of the copy that is traced
    return model.logits(x, product=product)


def _prompt(token_ids: npt.NDArray[np.int32]) -> ControlMessage:
    """The iteration of one request, whose whole prompt these tokens are."""
    n = len(token_ids)
    number = partial(np.full, 1, dtype=np.int32)
    return ControlMessage(
        row=number(0),
        initiation=np.array([True]),
        token_index=number(0),
        input_length=number(n),
        kv_length=number(n),
        n_prompt=number(n),
        next_token=number(SAMPLED),
        token_ids=token_ids.astype(np.int32),
        earlier_ids=np.zeros(0, np.int32),
        token_on_device=np.array([False]),
        block_table=np.arange(-(-n // _BLOCK), dtype=np.int32)[None],
        sampling=neutral_sampling(1),
        bias=np.zeros(0, BIAS),
    )
