"""Services on engines without a device, and a tokenizer of bytes, for tests of the layers above."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from orca_jax.config import Layout, Pooling, ServingConfig
from orca_jax.errors import BadAdapter, ConfigError, EngineError, TensorMismatch, UnknownAdapter
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.adapter import Adapter
from orca_jax.request.request import Request, Row, SharedDrafter
from orca_jax.request.token_text import BYTE_OF_CHARACTER
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.adapter_slots import PutAdapter
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, returned
from tests.gpt_config import gpt_config

SOON = 30.0  # seconds that nothing here takes
EOS = 99
MODEL = gpt_config(
    vocab_size=300, n_positions=64, hidden_size=8, n_layers=1, n_heads=1, ffn_size=8, eos_token_ids=(EOS,)
)
CONFIG = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8)


def letters() -> Tokenizer:
    """A tokenizer of single bytes: a token's id is its byte."""
    library = tokenizers.Tokenizer(models.BPE(BYTE_OF_CHARACTER, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library)


LETTERS = letters()


def counting(request: Request, index: int) -> int:
    """An engine's tokens that identify their request."""
    return (request.prompt_ids[0] + index) % MODEL.vocab_size


def writing(text: str) -> Callable[[Request, int], int]:
    """An engine's tokens that spell `text`."""
    return lambda _, index: ord(text[index % len(text)])


class GatedEngine:
    """An engine whose iterations return when the test lets them; `error` is raised instead of a return."""

    n_workers = 1
    keeps_tokens = False  # so that it is one iteration at a time

    def __init__(self, token: Callable[[Request, int], int] = counting) -> None:
        self.error: Exception | None = None
        self.gate = threading.Semaphore(0)
        self.waited_for = threading.Event()  # an iteration is out, and the scheduler waits for it
        self._token = token

    def issue(self, rows: Sequence[Row]) -> Iteration:
        return Iteration(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        self.waited_for.set()
        assert self.gate.acquire(timeout=SOON), "the test never let the iteration return"
        if self.error is not None:
            raise self.error
        return returned(iteration.rows, [self._token(req, len(req.output_ids)) for req, _ in iteration.rows])

    def let(self, n: int) -> None:
        """Let `n` iterations return."""
        self.gate.release(n)


class PacedEngine(SimulatedEngine):
    """Iterations that take `seconds` of real time; `error` is raised instead of a return, once it is set."""

    def __init__(self, token: Callable[[Request, int], int] = counting, *, seconds: float) -> None:
        super().__init__(VirtualClock(), token=token)
        self.error: Exception | None = None
        self.seconds = seconds
        self._never = threading.Event()

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        self._never.wait(self.seconds)
        if self.error is not None:
            raise self.error
        return super().wait(iteration, interrupted)


class FakeMemory:
    """An EngineMemory whose weights are their name; "wrong" is refused, and "fails" fails midway."""

    def __init__(self) -> None:
        self.weights: object = "first"
        self.level = 0
        self.done = list[str]()
        self.threads = set[str]()

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        if weights == "wrong":
            raise TensorMismatch("layers.0.up.weight has the shape [3], expected [4]")
        return lambda: self._install(weights)

    def read_ahead(self, directory: Path) -> Callable[[], None]:
        return self.prepare(str(directory), cast=False, lora_scale=1.0)

    def release(self, level: int) -> None:
        self._do(f"release {level}")
        self.level = level

    def restore(self) -> None:
        self._do("restore")
        self.level = 0

    def _install(self, weights: object) -> None:
        self._do(f"install {weights}")
        if weights == "fails":
            raise EngineError("the device failed midway")
        self.weights = weights

    def _do(self, what: str) -> None:
        self.done.append(what)
        self.threads.add(threading.current_thread().name)


class FakeAdapters:
    """An AdapterStore without arrays; the directory "wrong" holds no adapter."""

    generation = 0

    def __init__(self, *names: str) -> None:
        self.adapters: Mapping[str, Adapter] = {}
        self._n_added = 0
        for name in names:
            self.add(name, f"/{name}")

    def add(self, name: str, directory: str, *, replace: bool = False) -> Adapter:
        if name in self.adapters and not replace:
            raise ConfigError(f"there is an adapter {name!r} already")
        if directory == "wrong":
            raise BadAdapter("wrong: it holds NaN or infinite numbers")
        adapter = Adapter(name, self._n_added, f"{name} {self._n_added}", directory)
        self._n_added += 1
        self.adapters = {**self.adapters, name: adapter}
        return adapter

    def update(self, name: str, weights: object, *, scale: float) -> Adapter:
        return self.add(name, "", replace=True)

    def remove(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise UnknownAdapter(f"there is no adapter {name!r} here", param="lora_name")
        adapter = self.adapters[name]
        self.adapters = {each: one for each, one in self.adapters.items() if each != name}
        return adapter

    def read(self, adapter: Adapter) -> PutAdapter:
        return lambda slot: None


def orca(
    engine: Engine,
    *,
    config: ServingConfig = CONFIG,
    model: ModelConfig = MODEL,
    tokenizer: Tokenizer | None = None,
    seed: int | None = None,
    drafter: SharedDrafter | None = None,
    pooling: Pooling | None = None,
) -> Orca:
    """A service of `model` on `engine`, not started."""
    kv = KVManager(
        n_blocks=config.n_blocks,
        block_size=config.block_size,
        n_rows=(engine.n_workers + 1) * config.max_batch_size,
        max_blocks_per_row=-(-model.n_positions // config.block_size),
        prefix_caching=config.scheduling.prefix_caching,
    )
    return Orca(
        engine,
        kv,
        config=config,
        model=model,
        tokenizer=tokenizer,
        seed=seed,
        drafter=drafter,
        pooling=pooling,
    )


def simulated(token: Callable[[Request, int], int] = counting, n_workers: int = 1) -> SimulatedEngine:
    return SimulatedEngine(VirtualClock(), token=token, n_workers=n_workers)


def at_rest(service: Orca) -> bool:
    kv = service.scheduler.kv
    free = kv.n_free_blocks == kv.n_blocks and kv.n_free_rows == kv.n_rows
    return free and service.scheduler.n_rsrv == 0 and len(service.pool) == 0
