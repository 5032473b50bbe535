"""The metrics, predicted capacity and K/V events that a server shows to routers and autoscalers."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from orca_jax.config import Dtype
from orca_jax.errors import ConfigError, install_line
from orca_jax.planning.known_devices import CPU, KnownDevice, cpu_device, gpu_like
from orca_jax.planning.plan import Capacity, predicted_capacity
from orca_jax.workers.ask_xla import NoAnswer, ask_rates
from server.commands.notes import Notes
from server.gateway.served_model import ServedModel
from server.metrics.metrics import Metrics
from server.settings.endpoint_options import RouterOptions
from server.settings.serve_settings import ServeSettings

if TYPE_CHECKING:
    from orca_jax import LLM
if TYPE_CHECKING:
    from server.kv_events.publisher import Publisher


_LABELS = ("model_name",)


class RouterView:
    """Binds the addresses of K/V events when it is made, so that one in use is reported at once.

    `open` begins to show a loaded model, and may take seconds; `close` ends the events, in seconds at most.
    Both may run on any thread. Raises ConfigError.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._publisher = kv_publisher(settings.routing)

    def open(self, llm: "LLM", model: ServedModel, metrics: Metrics, notes: Notes) -> None:
        """Attach the metrics to the model, and publish its prefix cache. Call it while no request is live."""
        others = [_PredictedCapacity(_capacity_of(llm, self._settings, notes), model.name).collect]
        if self._publisher is not None:
            self._publisher.start(model.orca.scheduler.kv)
            others.append(self._publisher.collect)
        metrics.attach(model, *others)

    def close(self) -> None:
        """A second call does nothing."""
        if self._publisher is not None:
            self._publisher.close()


class _PredictedCapacity:
    """Metrics of a capacity, labelled `model_name`; no metrics if the capacity is None."""

    def __init__(self, capacity: Capacity | None, model_name: str) -> None:
        self._capacity = capacity
        self._values = (model_name,)

    def collect(self) -> Iterator[Metric]:
        """Metrics; for any thread."""
        capacity = self._capacity
        if capacity is None:
            return
        for name, documentation, value in (
            (
                "predicted_capacity_tokens_per_second",
                "Tokens a second that the devices could generate at best within the latency budget.",
                capacity.tokens_per_second,
            ),
            ("predicted_capacity_requests", "Requests in that batch.", capacity.batch_size),
            ("predicted_capacity_context_tokens", "Cached tokens of each of them.", capacity.context),
        ):
            gauge = GaugeMetricFamily(f"orca_{name}", documentation, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge


def _capacity_of(llm: "LLM", settings: ServeSettings, notes: Notes) -> Capacity | None:
    """The engine's best possible throughput; None if its device's rates are not known.

    With a latency budget a CPU's rates are measured, which takes seconds. Raises ConfigError.
    """
    routing, dtype = settings.routing, cast("Dtype", llm.dtype)
    device = _device(llm.device, dtype, measured=routing.latency_budget is not None, notes=notes)
    if device is None:
        return None
    capacity = predicted_capacity(
        llm.config,
        llm.serving,
        device,
        dtype=dtype,
        parallel=settings.engine,
        context=routing.predicted_context,
        latency_budget=routing.latency_budget,
    )
    if not capacity.batch_size:
        notes(
            "the predicted capacity is 0: even one request takes longer than latency_budget, or lacks slots"
        )
    return capacity


def _device(name: str, dtype: Dtype, *, measured: bool, notes: Notes) -> KnownDevice | None:
    if name != CPU:
        return gpu_like(name)
    if not measured:
        return None
    try:
        bandwidth, matrix_rate = ask_rates(dtype)
    except NoAnswer as error:
        notes(f"/metrics has no predicted capacity: {error}")
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cpu_device(memory=memory, bandwidth=bandwidth, matrix_rate=matrix_rate)


def kv_publisher(options: RouterOptions) -> "Publisher | None":
    """A publisher with bound addresses, not yet started; None if events are off.

    Raises ConfigError if a library is missing or an address is unusable.
    """
    if options.kv_events is None:
        return None
    missing = [name for module, name in (("zmq", "pyzmq"), ("msgpack", "msgpack")) if not find_spec(module)]
    if missing:
        raise ConfigError(
            f"kv_events needs {' and '.join(missing)}: {install_line('kv-events')} (or leave it out)"
        )
    # Imported on demand: the libraries are an extra, which a server without events does not need.
    from server.kv_events.publisher import Publisher

    return Publisher(options.kv_events, options.kv_events_replay, topic=options.kv_events_topic)
