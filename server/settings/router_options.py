"""The options of `orca serve` for several engines, and for what routers and autoscalers see of it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from orca_jax.checks import check_timeout
from orca_jax.errors import ConfigError
from orca_jax.options import Options

MetricNames = Literal["orca", "vllm"]  # of what the engine measures: server/metrics/engine_metrics.py


@dataclass(frozen=True, kw_only=True)
class RouterOptions(Options):
    """Metrics' names, predicted capacity and K/V events (docs/scale-out.md). Raises ConfigError."""

    replicas: Annotated[
        int | None,
        "number of engines behind one address, each in a process of Ray's, which must be installed (default: "
        "one, in this process)",
        "workers",
    ] = None
    metric_names: Annotated[
        MetricNames,
        "names in /metrics; vllm: vLLM's for what it measures too, for routers that know only those",
    ] = "orca"
    latency_budget: Annotated[
        float | None,
        "seconds between two tokens of a request for which /metrics predicts the capacity; on a CPU the "
        "start takes some seconds longer, to measure it (default: none; a known GPU's full batch)",
        check_timeout,
    ] = None
    predicted_context: Annotated[
        int | None,
        "cached tokens of a request for which the capacity is predicted (default: half the model's "
        "positions, at most 1024)",
    ] = None
    kv_events: Annotated[
        str | None,
        "ZeroMQ address for events about the prefix cache, in vLLM's format: bound if it is like "
        "tcp://*:5557, else connected to; it needs the extra kv-events (default: no events)",
    ] = None
    kv_events_replay: Annotated[
        str | None, "ZeroMQ address at which subscribers ask for events that they missed (default: none)"
    ] = None
    kv_events_topic: Annotated[str, "topic of the events, such as kv@POD@MODEL (default: empty)"] = ""
    prefix_hash_seed: Annotated[
        str,
        "seed of the hashes of the prefix cache's blocks; give replicas behind one router the same "
        "(default: empty)",
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and "://" not in address:
                raise ConfigError(f"{name} is {address!r}; it must be an address such as tcp://*:5557")
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ConfigError("kv_events_replay repeats events; give the address of kv_events too")
