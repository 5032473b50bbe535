"""A worker: one stage's parameters, K/V cache and programs. It issues work and never waits for it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.config import Attention, ModelConfig, ServingConfig
from orca_jax.control import ControlMessage
from orca_jax.flat_batch import FlatBatch
from orca_jax.model.gpt import Parameters
from orca_jax.model.kv_cache import empty_cache
from orca_jax.sharding.attention_path import choose_attention
from orca_jax.sharding.stage import Stage


class DeviceTokens:
    """The tokens of an issued iteration, on their way to the host."""

    def __init__(self, tokens: jax.Array) -> None:
        tokens.copy_to_host_async()
        self._tokens = tokens

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        return self._tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # jax's stub lacks it

    def fetch(self) -> npt.NDArray[np.int32]:
        """[R] int32, after waiting for the device; what failed there is raised here."""
        return np.asarray(self._tokens)


class Worker:
    """The single worker of an engine with one stage, on the device that holds `parameters`.

    The cache is made in the parameters' dtype. `n_rows` is the size of `last_token`: the places of all
    admitted requests. `attention` is chosen by device and model unless given;
    raises ConfigError where that cannot run.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        serving: ServingConfig,
        *,
        n_rows: int,
        attention: Attention | None = None,
    ) -> None:
        embedding = parameters["token_embedding"]
        (self.device,) = embedding.devices()
        self.attention = choose_attention(
            self.device, config, block_size=serving.block_size, dtype=embedding.dtype, forced=attention
        )
        self.stage = Stage(config, parameters, attention=self.attention.path)
        with jax.default_device(self.device):
            caches = empty_cache(
                config,
                n_blocks=serving.n_blocks,
                block_size=serving.block_size,
                dtype=embedding.dtype,
            )
            last_token = jnp.zeros(n_rows, jnp.int32)
        # Committed to the device, as the programs give them back: else each program would compile twice.
        self._caches, self._last_token = jax.device_put((caches, last_token), self.device)

    def issue(self, message: ControlMessage, flat: FlatBatch) -> DeviceTokens:
        """Start one iteration and return at once.

        The device runs what it is given in order, so caches and last_token of one iteration are whole before
        the next reads them. `message` is what a worker in another process would need; here `flat` says all.
        """
        del message
        words = self.attention.path.words(flat.layout, flat.arrays)
        whole = np.concatenate((flat.buffer, words)) if len(words) else flat.buffer
        buffer = jax.device_put(whole, self.device)
        logits, self._caches = self.stage.forward(
            self.stage.weights, self._caches, self._last_token, buffer, layout=flat.layout
        )
        tokens, self._last_token = self.stage.choose(
            logits, self._last_token, buffer, layout=flat.layout, sampler=flat.sampler
        )
        return DeviceTokens(tokens)
