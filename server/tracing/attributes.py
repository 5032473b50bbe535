"""The attributes of spans: OpenTelemetry's names for generative models, and vLLM's for the rest."""

from orca_jax.scheduling.timeline import RequestRecord
from server.tracing.call import AttributeValue, Call, Choice

PROVIDER = "orca_jax"

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST = "gen_ai.request."  # prefix of a parameter's name
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

HTTP_METHOD, HTTP_ROUTE = "http.request.method", "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM, RPC_METHOD = "rpc.system.name", "rpc.method"
RPC_STATUS = "rpc.response.status_code"

# vLLM's names; the latencies are in seconds.
REQUEST_ID = "gen_ai.request.id"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
E2E = "gen_ai.latency.e2e"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"


def call_attributes(call: Call, model: str) -> dict[str, AttributeValue]:
    """Make the attributes of a client's whole request; those that the endpoint has set take precedence."""
    attributes: dict[str, AttributeValue] = {
        OPERATION: call.operation,
        PROVIDER_NAME: PROVIDER,
        REQUEST_MODEL: model,
        RESPONSE_MODEL: model,
    }
    if call.choices:
        attributes |= _sampling_attributes(call.choices[0])
        reasons = [choice.record.finish_reason for choice in call.choices if choice.record is not None]
        attributes[FINISH_REASONS] = [str(reason) for reason in reasons if reason is not None]
    if len(call.choices) > 1:
        attributes[REQUEST_CHOICES] = len(call.choices)
    return attributes | call.attributes


def _sampling_attributes(choice: Choice) -> dict[str, AttributeValue]:
    """Make the attributes of a choice's sampling parameters."""
    return {REQUEST + name: value for name, value in choice.sampling.items()}


def choice_attributes(choice: Choice, record: RequestRecord) -> dict[str, AttributeValue]:
    """Make the attributes of one request in the service, from its record."""
    attributes: dict[str, AttributeValue] = {
        REQUEST_ID: choice.request_id,
        **_sampling_attributes(choice),
        INPUT_TOKENS: record.n_input,
        CACHED_TOKENS: record.n_cached,
        OUTPUT_TOKENS: record.n_output,
    }
    if record.finish_reason is not None:
        attributes[FINISH_REASONS] = [str(record.finish_reason)]
    seconds = {
        TIME_IN_QUEUE: record.queue_time,
        TIME_TO_FIRST_TOKEN: record.time_to_first_token,
        E2E: None if record.finished is None else record.finished - record.arrived,
    }
    if record.scheduled is not None and record.token_times:
        seconds[TIME_IN_PREFILL] = record.token_times[0] - record.scheduled
        seconds[TIME_IN_DECODE] = record.token_times[-1] - record.token_times[0]
    return attributes | {name: value for name, value in seconds.items() if value is not None}
