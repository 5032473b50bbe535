"""The methods of `LLM` that replace its weights, give its memory back, and pause it."""

from orca_jax.families.trainers.formats import Layout
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.interludes import Running


class Operable:
    """A running engine as the trainer or operator who owns it sees it; all methods are thread-safe.

    `running` says what becomes of requests that have begun: they finish first ("finish"), within `timeout`
    seconds, while others wait; or end as cancelled ("abort"); or stop between two iterations and go on
    afterwards ("continue"). RequestsStillRunning says that they did not finish; nothing has changed then.
    Every method also raises ServiceClosed, and EngineError if the engine has failed.
    """

    @property
    def controls(self) -> EngineControls:
        raise NotImplementedError

    @property
    def weights_version(self) -> int:
        """The version of the weights: 0 as loaded, and counted up by `update_weights`."""
        return self.controls.weights_version

    def update_weights(
        self,
        weights: object,
        *,
        version: int | None = None,
        running: Running = "finish",
        timeout: float = 600.0,
        cast: bool = False,
        lora_scale: float = 1.0,
        layout: Layout | None = None,
    ) -> int:
        """Replace the weights between two iterations, without a compile; return their version.

        `weights` is a dict of arrays by the names of `families.parameters`, an nnx.State or nnx.Module with
        such paths, or the directory of a checkpoint of the same model. Names and forms may also be those of
        MaxText, Tunix or Gemma's own code: arrays of another `layout` than the given one are refused; without
        it their names say whose they are. Arrays are copied; `cast` allows other floating dtypes. Names that
        end in .lora_a and .lora_b are adapters, which are merged times `lora_scale` (docs/training.md).
        `version`, by default one more than before, must be later than that.

        Requests that "continue" keep their tokens; all keys and values are computed again, so each further
        token depends on the new weights alone.

        Raises ConfigError, a CheckpointError that names what differs, or RequestsStillRunning; the weights
        are then as before. Raises EngineError, and the engine has failed, if a device or a file fails midway.
        """
        return self.controls.update_weights(
            weights,
            version=version,
            running=running,
            timeout=timeout,
            cast=cast,
            lora_scale=lora_scale,
            layout=layout,
        )

    def sleep(self, level: int = 1, *, running: Running = "finish", timeout: float = 600.0) -> None:
        """Give back the memory of keys and values; with level 2 that of weights too, which go to the host.

        New requests are refused with EngineAsleep until `wake_up`. Raises ConfigError for another level.
        """
        self.controls.sleep(level, running=running, timeout=timeout)

    def wake_up(self, *, timeout: float = 600.0) -> None:
        """End a sleep: bring the weights back, unless `update_weights` did, and make empty caches."""
        self.controls.wake_up(timeout=timeout)

    def pause(self, *, running: Running = "continue", timeout: float = 600.0) -> None:
        """Issue no iteration until `resume`; requests are accepted and wait."""
        self.controls.pause(running=running, timeout=timeout)

    def resume(self) -> None:
        """End a pause."""
        self.controls.resume()
