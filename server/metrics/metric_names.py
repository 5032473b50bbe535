"""What the engine's metrics are called: our own names, or vLLM's where one of the same meaning exists.

Source: vllm/v1/metrics/loggers.py of vLLM 0.32. Routers of the Gateway API inference extension and dashboards
know these names. What vLLM counts differently keeps our name: its `iteration_tokens_total`, for instance,
counts the tokens that come out of an iteration besides those that go in.
"""

from dataclasses import dataclass

from orca_jax.request.request import FinishReason
from server.settings.router_options import MetricNames

_SAME_IN_VLLM = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
        *("generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        "request_queue_time_seconds",
    )
)
_ENGINE = "0"  # vLLM numbers the engines of a server; ours has one
_VLLM_REASONS = {FinishReason.CANCELLED: "abort", FinishReason.TIMEOUT: "abort"}


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric's whole name, and the names and values of the labels that all its samples have."""

    name: str
    labels: tuple[str, ...]
    values: tuple[str, ...]
    is_vllm: bool

    def reason(self, reason: FinishReason) -> str:
        """How the label `finished_reason` says it."""
        return _VLLM_REASONS.get(reason, reason.value) if self.is_vllm else reason.value


def metric_name(name: str, model: str, names: MetricNames) -> MetricName:
    """The metric that our code calls `name`, of the model that clients call `model`."""
    if names == "vllm" and name in _SAME_IN_VLLM:
        return MetricName(f"vllm:{name}", ("model_name", "engine"), (model, _ENGINE), is_vllm=True)
    return MetricName(f"orca_{name}", ("model_name",), (model,), is_vllm=False)
