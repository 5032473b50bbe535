"""An engine that is ready to serve, wherever its workers are, and what there is to say of it."""

from collections.abc import Callable
from dataclasses import dataclass

from orca_jax.config import ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.families.model_config import ModelConfig
from orca_jax.scheduling.kv_manager import KVManager


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine, the K/V manager of its caches, and its sizes.

    `buckets` are the total-token sizes that programs are compiled for; `dtype` that of weights, keys and
    values. `device`, `stages` and `attention` are said at start-up. `close` ends what belongs to the engine
    beside this object; it may be called again.
    """

    engine: EngineMaster
    kv: KVManager
    model: ModelConfig
    serving: ServingConfig
    buckets: tuple[int, ...]
    dtype: str
    device: str
    stages: str
    attention: str
    close: Callable[[], None]
