"""`/metrics` has every name in the documents by which routers read it."""

import asyncio
import re
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from orca_jax.config import ServingConfig
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.metrics import Metrics
from server.settings.endpoint_options import MetricNames
from tests.host.engines import MODEL, SOON, FakeAdapters, GatedEngine, orca

# Gateway API inference extension, docs/proposals/003-model-server-protocol/README.md, and llm-d-router,
# docs/plugin-metric-protocol.md: what a model server must or may show, as a gauge, with vLLM's names for it.
PROTOCOL = {
    "TotalQueuedRequests": ("vllm:num_requests_waiting", None),
    "TotalRunningRequests": ("vllm:num_requests_running", None),
    "KVCacheUtilization": ("vllm:kv_cache_usage_perc", None),
    "BlockSize": ("vllm:cache_config_info", "block_size"),
    "NumGPUBlocks": ("vllm:cache_config_info", "num_gpu_blocks"),
}
# vLLM 0.32, vllm/v1/metrics/loggers.py: every metric of its PrometheusStatLogger that is always there, with
# its type and the labels besides model_name and engine.
VLLM: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "engine_sleep_state": ("gauge", ("sleep_state",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "external_prefix_cache_queries": ("counter", ()),
    "external_prefix_cache_hits": ("counter", ()),
    "mm_cache_queries": ("counter", ()),
    "mm_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_by_source": ("counter", ("source",)),
    "prompt_tokens_cached": ("counter", ()),
    "prompt_tokens_cached_by_source": ("counter", ("source",)),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "iteration_tokens_total": ("histogram", ()),
    "request_max_num_generation_tokens": ("histogram", ()),
    "request_params_n": ("histogram", ()),
    "request_params_max_tokens": ("histogram", ()),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_inference_time_seconds": ("histogram", ()),
    "request_prefill_time_seconds": ("histogram", ()),
    "request_decode_time_seconds": ("histogram", ()),
    "request_num_preemptions": ("histogram", ()),
    "request_prefill_kv_computed_tokens": ("histogram", ()),
    "cache_config_info": ("gauge", ("block_size", "num_gpu_blocks", "enable_prefix_caching")),
}
VLLM_REASONS = {"stop", "length", "abort", "error", "repetition"}
# What both measure under one name, and not in the same way.
KEPT = {"request_time_per_output_token_seconds", "iteration_tokens_total"}
CONFIG = ServingConfig(max_batch_size=2, n_slots=256, max_batch_tokens=64, block_size=8)

Families = dict[str, Metric]


class Engine:
    """A service whose iterations come back when the test lets them."""

    def __init__(self) -> None:
        self.gated = GatedEngine()
        self.service = orca(self.gated, config=CONFIG)
        self.service.start()
        self.model = ServedModel(name="m", service=self.service, config=MODEL, serving=CONFIG)

    def metrics(self, names: MetricNames) -> Metrics:
        async def on_a_loop() -> Metrics:
            return Metrics(Gateway(), names)

        metrics = asyncio.run(on_a_loop())
        metrics.attach(self.model)
        return metrics

    def close(self) -> None:
        self.gated.let(1000)
        self.service.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.close()


def families(metrics: Metrics) -> Families:
    text = metrics.render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_of_the_protocol_has_its_name_type_and_meaning(engine: Engine) -> None:
    metrics = engine.metrics("vllm")
    held: list[object] = []  # a request whose handle is dropped ends
    for i in range(3):
        held.append(engine.service.submit([i] * 20, SamplingParams(max_tokens=9, ignore_eos=True)))
        if not i:
            assert engine.gated.waited_for.wait(SOON)
    shown = families(metrics)
    values: dict[str, float] = {}
    for what, (name, label) in PROTOCOL.items():
        (sample,) = shown[name].samples
        assert shown[name].type == "gauge" and sample.labels["model_name"] == "m"
        values[what] = sample.value if label is None else int(sample.labels[label])
    assert values == {
        "TotalQueuedRequests": 2,
        "TotalRunningRequests": 1,
        "KVCacheUtilization": 4 / 32,  # Algorithm 1 reserves 20 + 9 tokens in blocks of 8
        "BlockSize": 8,
        "NumGPUBlocks": 32,
    }
    # This engine has no room for LoRA adapters, so nothing is said of them.
    assert not [name for name in shown if "lora" in name]


def test_adapters_of_running_and_of_waiting_requests(engine: Engine) -> None:
    engine.service.adapter_store = FakeAdapters("sql", "other", "idle")
    metrics, held = engine.metrics("vllm"), list[object]()
    for name in ("sql", None, "other"):
        params, scheduling = SamplingParams(max_tokens=9, ignore_eos=True), SchedulingParams(adapter=name)
        held.append(engine.service.submit([1] * 20, params, scheduling=scheduling))
        if name == "sql":
            assert engine.gated.waited_for.wait(SOON)
    (sample,) = families(metrics)["vllm:lora_requests_info"].samples
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    assert tuple(sample.labels[name] for name in labels) == (str(CONFIG.max_loras), "sql", "other")


def test_with_vllm_s_names_each_metric_is_as_in_vllm(engine: Engine) -> None:
    ours, theirs = families(engine.metrics("orca")), families(engine.metrics("vllm"))
    renamed = {name.removeprefix("vllm:") for name in theirs if name.startswith("vllm:")}
    assert renamed <= VLLM.keys(), "no name is made up"
    for name in renamed:
        family = theirs[f"vllm:{name}"]
        kind, labels = VLLM[name]
        assert family.type == kind, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {"model_name", "engine", *labels}, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")
    # In place of ours, and the rest keeps its name.
    assert {f"orca_{name}" for name in renamed} == ours.keys() - theirs.keys()
    assert not {f"orca_{name}" for name in renamed} & theirs.keys()
    same = {name.removeprefix("orca_") for name in ours} & VLLM.keys()
    assert renamed == same - KEPT, "whatever has the same name has the same meaning"
    assert {"orca_engine_load", "orca_batch_load", "orca_slots_total"} <= theirs.keys()


def test_finish_reasons_are_those_of_vllm(engine: Engine) -> None:
    metrics = engine.metrics("vllm")
    done = engine.service.submit([1], SamplingParams(max_tokens=1, ignore_eos=True))
    engine.gated.let(1)
    done.result(SOON)
    for reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
        one = engine.service.submit([1], SamplingParams(max_tokens=9, ignore_eos=True))
        one.end(reason)
        engine.gated.let(5)
        one.result(SOON)
    samples = families(metrics)["vllm:request_success"].samples
    counts = {sample.labels["finished_reason"]: sample.value for sample in samples}
    assert counts.keys() <= VLLM_REASONS
    assert (counts["length"], counts["abort"], counts["stop"], counts["error"]) == (1, 2, 0, 0)


def test_other_metrics_keep_our_names(engine: Engine) -> None:
    shown = families(engine.metrics("orca"))
    assert not [name for name in shown if name.startswith("vllm:")]
    (sample,) = shown["orca_cache_config_info"].samples
    assert sample.labels == {
        "model_name": "m",
        "block_size": "8",
        "num_gpu_blocks": "32",
        "enable_prefix_caching": "False",
    }
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in shown)
