"""An engine that is ready to serve, with its description; its workers may be local or remote."""

from collections.abc import Callable
from dataclasses import dataclass

from orca_jax.config import ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.engine_memory import EngineMemory
from orca_jax.families.model_config import ModelConfig
from orca_jax.scheduling.kv_manager import KVManager


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine, the K/V manager of its caches, and its sizes.

    `buckets` are the total-token sizes of the compiled programs. `dtype` is the dtype of weights, keys and
    values. `device`, `stages` and `attention` are texts to show at start-up. `close` ends the engine's
    connections, processes and threads, and is idempotent. `memory` may be missing before `start_engine` adds
    it. `compile_later(on_buckets)`, where there is one, starts to compile the programs of more buckets while
    the engine serves, and calls `on_buckets` with all that are in use after each.
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
    memory: EngineMemory | None = None
    compile_later: Callable[[Callable[[tuple[int, ...]], object]], object] | None = None
