"""The controls of a running engine: update of weights, sleep, pause. For any thread but the scheduler's."""

from pathlib import Path

from orca_jax.checks import checked_name
from orca_jax.config import Layout
from orca_jax.engine_memory import EngineMemory
from orca_jax.errors import ConfigError
from orca_jax.families.trainers.layouts import ITEMS
from orca_jax.scheduling.adapter_slots import AdapterStore
from orca_jax.scheduling.restart import change_weights, compute_all_again
from orca_jax.service.interludes import Running
from orca_jax.service.orca import Orca

MAX_VERSION = 2**53 - 1  # JSON readers that have only doubles still read it exactly


class EngineControls:
    """The controls that `LLM` and the admin routes offer. Each call waits until it is done.

    `Interludes.run` describes `running`, `timeout` and RequestsStillRunning. Every call may also raise
    ServiceClosed or EngineError.
    """

    def __init__(self, service: Orca, memory: EngineMemory) -> None:
        self._service = service
        self._scheduler = service.scheduler
        self._interludes = service.interludes
        self._memory = memory

    @property
    def weights_version(self) -> int:
        """The version of the weights that compute new tokens."""
        return self._scheduler.weights_version

    @property
    def paused(self) -> bool:
        return self._interludes.paused

    @property
    def asleep(self) -> int:
        """The level of the engine's sleep; 0 while it is awake."""
        return self._interludes.asleep

    @property
    def busy(self) -> bool:
        """Whether a change is under way, for which another one would wait."""
        return self._interludes.busy

    def update_weights(
        self,
        weights: object,
        *,
        version: int | None,
        running: Running,
        timeout: float,
        cast: bool = False,
        lora_scale: float = 1.0,
        layout: Layout | None = None,
        adapter: str | None = None,
        read_ahead: bool = False,
    ) -> int:
        """Replace the weights, or one `adapter`; return their version. See `LLM.update_weights`.

        With `read_ahead` the weights are a checkpoint's directory, which is read into host memory while
        requests run: what is wrong with its data then changes nothing. Worker processes read it themselves,
        and keep the old weights if one of them cannot.
        """
        if adapter is not None:
            if version is not None or cast or layout is not None:
                raise ConfigError(
                    "version, cast and layout are for whole weights; leave them out, or adapter"
                )
            return self._store().update(checked_name("adapter", adapter), weights, scale=lora_scale).version
        if version is not None and not (isinstance(version, int) and 0 < version <= MAX_VERSION):
            raise ConfigError(f"version is {version!r}; it must be a whole number from 1 to {MAX_VERSION}")
        if layout is not None and layout not in ITEMS:
            raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(ITEMS)}")
        if layout is not None and isinstance(weights, str | Path):
            raise ConfigError(
                "layout is for arrays; a checkpoint names its layout itself, so leave layout out"
            )
        installed = list[int]()
        if read_ahead:
            assert isinstance(weights, str | Path)
            install = self._memory.read_ahead(Path(weights))
        else:
            install = self._memory.prepare(weights, cast=cast, lora_scale=lora_scale, layout=layout)

        def work() -> None:
            now = self.weights_version
            if version is not None and version <= now:
                raise ConfigError(f"version is {version}, and the engine has version {now}; give a later one")
            install()
            installed.append(now + 1 if version is None else version)
            change_weights(self._scheduler, installed[0])

        self._interludes.run(work, running=running, timeout=timeout)
        return installed[0]

    def load_adapter(self, name: str, directory: str, *, replace: bool = False) -> None:
        """Let requests choose the LoRA adapter in `directory`; see `LLM.load_adapter`."""
        self._store().add(checked_name("lora_name", name), directory, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Let no more requests choose a LoRA adapter. Raises UnknownAdapter."""
        self._store().remove(name)

    def _store(self) -> AdapterStore:
        store = self._service.adapter_store
        if store is None:
            raise ConfigError(
                "the engine has no room for LoRA adapters; start it with --max-loras N (max_loras=N)"
            )
        return store

    def sleep(self, level: int, *, running: Running, timeout: float) -> None:
        """Release device memory; see `LLM.sleep`."""
        if level not in (1, 2) or isinstance(level, bool):
            raise ConfigError(f"level is {level!r}; it must be 1 (keys and values) or 2 (weights too)")

        def work() -> None:
            if level > self.asleep:
                self._memory.release(level)
                compute_all_again(self._scheduler)
                self._interludes.asleep = level

        self._interludes.run(work, running=running, timeout=timeout)

    def wake_up(self, *, timeout: float) -> None:
        """End a sleep; see `LLM.wake_up`."""

        def work() -> None:
            if self.asleep:
                self._memory.restore()
                self._interludes.asleep = 0

        self._interludes.run(work, running="continue", timeout=timeout)

    def pause(self, *, running: Running, timeout: float) -> None:
        """Issue no more iterations; see `LLM.pause`."""
        self._interludes.pause(running=running, timeout=timeout)

    def resume(self) -> None:
        """End a pause."""
        self._interludes.resume()
