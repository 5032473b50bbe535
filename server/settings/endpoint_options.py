"""The options that `orca serve` adds to the engine's: endpoints, and what routers and autoscalers see.

orca_jax/options.py says how they are declared.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from orca_jax.checks import Whole, check_timeout
from orca_jax.errors import ConfigError
from orca_jax.options import In, Options

_PORT = Whole(0, 65535)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+")
_MAX_NAME = 256  # characters of served_model_name
MetricNames = Literal["orca", "vllm"]  # of what the engine measures: server/metrics/engine_metrics.py
AccessLog = Literal["text", "json", "off"]

# The names in server.gateway.tool_formats.table; a test compares them.
ToolFormatName = Literal[
    "auto",
    "none",
    "hermes",
    "llama3",
    "mistral",
    "mistral_v11",
    "gemma",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v31",
]
ReasoningFormatName = Literal["auto", "none", "think", "mistral", "granite", "gpt_oss"]


@dataclass(frozen=True, kw_only=True)
class EndpointOptions(Options):
    """Addresses, names, limits and keys of both endpoints.

    Raises ConfigError if a value is out of bounds or values contradict each other.
    """

    host: Annotated[str, "address to listen on; 0.0.0.0 for every interface", "addresses"] = "127.0.0.1"
    port: Annotated[int, "port for HTTP; 0 picks a free one", "addresses", _PORT] = 8000
    grpc_port: Annotated[
        int | None, "port for gRPC; 0 picks a free one, 'none' turns gRPC off", "addresses", _PORT
    ] = 8001
    served_model_name: Annotated[
        str | None, "the model's name in the API (default: its directory's name)", "model and engine"
    ] = None
    chat_template: Annotated[
        Path | None,
        "file with a Jinja chat template (default: the checkpoint's)",
        "model and engine",
        In("serve", "generate", "chat"),
    ] = None
    tool_format: Annotated[
        ToolFormatName,
        "how the model writes tool calls (docs/tools.md); auto: as the chat template shows; none: they stay "
        "text",
        "model and engine",
        In("serve", "generate"),  # there are no tools in a chat on the terminal
    ] = "auto"
    reasoning_format: Annotated[
        ReasoningFormatName,
        "how the model writes its reasoning; auto: as the chat template shows; none: it stays text",
        "model and engine",
        In("serve", "generate", "chat"),
    ] = "auto"
    api_key_file: Annotated[
        Path | None,
        "file with API keys, one per line; ORCA_API_KEYS adds more, separated by commas (default: no keys)",
        "security",
    ] = None
    admin_key_file: Annotated[
        Path | None,
        "file with keys, one per line, for the routes under /admin, which replace weights and pause the "
        "engine; ORCA_ADMIN_KEYS adds more (default: no such routes)",
        "security",
    ] = None
    follow: Annotated[
        Path | None,
        "folder where a training run saves checkpoints of the model: each is loaded while serving, once it "
        "is complete, and responses have the version of the weights (default: none)",
        "model and engine",
    ] = None
    control_secret_file: Annotated[
        Path | None,
        "file with the secret shared by server and workers; or set ORCA_CONTROL_SECRET (default: none, and "
        "workers listen only on loopback)",
        "security",
    ] = None
    ssl_certfile: Annotated[Path | None, "certificate chain (PEM), for TLS on both endpoints", "security"] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, "private key (PEM) of --ssl-certfile", "security"] = None
    request_timeout: Annotated[
        float, "maximum seconds from a request's arrival to its end", check_timeout
    ] = 600.0
    drain_timeout: Annotated[float, "seconds for running requests to finish after SIGTERM", check_timeout] = (
        30.0
    )
    end_with_stdin: Annotated[
        bool,
        "also stop when standard input, which must be a pipe, closes: the server then ends with the process "
        "that started it, even if that is killed",
    ] = False
    max_body_bytes: Annotated[int, "maximum size of a request body", Whole(1024, 1 << 30)] = 4 << 20
    max_choices: Annotated[
        int, "maximum completions per request (its prompts times n)", Whole(1, 1 << 16)
    ] = 128
    max_stored_responses: Annotated[
        int, "maximum responses of /v1/responses kept for previous_response_id; 0: none", Whole(0, 1 << 20)
    ] = 4096
    max_stored_bytes: Annotated[int, "maximum bytes of kept responses", Whole(1 << 16, 1 << 40)] = 64 << 20
    stored_response_seconds: Annotated[float, "seconds that a response is kept", check_timeout] = 3600.0
    max_inputs: Annotated[
        int, "maximum inputs of a request for embeddings, scores or a ranking", Whole(1, 1 << 16)
    ] = 2048
    batch_dir: Annotated[
        Path | None,
        "folder for clients' files and batches (/v1/files, /v1/batches), which continue after a restart "
        "(default: no such routes)",
        "limits",
    ] = None
    batch_bytes: Annotated[
        int, "maximum bytes of files in --batch-dir", "limits", Whole(1 << 20, 1 << 50)
    ] = 4 << 30
    endpoint_processes: Annotated[
        int,
        "processes that read requests for completions, chats and messages and write the answers, so that the "
        "engine's process has its time for the engine; 0: all in one process",
        "addresses",
        Whole(0, 64),
    ] = 0
    max_connections: Annotated[
        int, "maximum open connections per endpoint; HTTP answers further ones with 503", Whole(1, 1 << 20)
    ] = 4096
    max_connections_per_address: Annotated[
        int,
        "maximum open HTTP connections per address (IPv6: per /64); further ones get 429",
        Whole(1, 1 << 20),
    ] = 1024
    max_header_bytes: Annotated[
        int, "maximum size of a request's line and headers, or of gRPC metadata", Whole(1024, 1 << 20)
    ] = 32768
    header_timeout: Annotated[
        float,
        "seconds from a connection's start, or a request's first byte, to the end of its headers",
        check_timeout,
    ] = 10.0
    body_timeout: Annotated[
        float, "seconds from the end of a request's headers to the end of its body", check_timeout
    ] = 30.0
    keep_alive_timeout: Annotated[
        float, "seconds that an HTTP connection may idle between requests", check_timeout
    ] = 65.0
    max_watch_streams: Annotated[
        int,
        "maximum open gRPC streams of the health and reflection services, which need no key",
        Whole(0, 1 << 16),
    ] = 64
    strict: Annotated[
        bool,
        "refuse requests with fields that have no effect, such as prompt_cache_key; otherwise the response "
        "header x-orca-ignored names these",
    ] = False
    allow_origins: Annotated[
        str | None,
        "comma-separated origins, such as https://chat.example.org, whose web pages may call the API from a "
        "browser (CORS); '*' for all (default: none)",
        "security",
    ] = None
    pages: Annotated[
        bool, "serve web pages: the playground at /, the live view at /live, the API at /docs"
    ] = True
    access_log: Annotated[AccessLog, "log each request on stderr, as text or JSON", "logging"] = "text"
    log_probes: Annotated[
        bool, "also log probes (/health, /ready, /metrics) and the pages' files", "logging"
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        "URL of an OpenTelemetry collector for a trace of each request, such as "
        "http://localhost:4318/v1/traces; needs the extra otel (default: no traces)",
        "logging",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host.strip():
            raise ConfigError(
                "host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for every interface"
            )
        name = self.served_model_name
        if name is not None and not (name.isprintable() and 1 <= len(name) <= _MAX_NAME):
            raise ConfigError(
                f"served_model_name is {name[:_MAX_NAME]!r}; it must be 1 to {_MAX_NAME} printable characters"
            )
        if self.grpc_port is not None and self.port == self.grpc_port != 0:
            raise ConfigError(f"port and grpc_port are both {self.port}; give each endpoint its own")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together; give both or neither")
        url = self.otlp_traces_endpoint
        if url is not None and not url.startswith(("http://", "https://")):
            message = (
                f"otlp_traces_endpoint is {url!r}; it must be a URL that begins with http:// or https://"
            )
            raise ConfigError(message)
        if self.endpoint_processes and url is not None:
            raise ConfigError(
                "otlp_traces_endpoint traces the requests of one process, and endpoint_processes asks for "
                "more; leave one of them out"
            )
        for origin in self.origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                message = (
                    f"allow_origins has {origin!r}; it must be '*', or origins separated by commas, such as "
                )
                raise ConfigError(
                    f"{message}https://chat.example.org or http://localhost:3000, without a path"
                )

    @property
    def origins(self) -> list[str]:
        """The elements of `allow_origins`."""
        return [one.strip() for one in self.allow_origins.split(",")] if self.allow_origins else []


@dataclass(frozen=True, kw_only=True)
class RouterOptions(Options):
    """Metrics' names, predicted capacity and K/V events (docs/scale-out.md). Raises ConfigError."""

    replicas: Annotated[
        int | None,
        "number of engines behind one address, each in a Ray process; needs the extra ray (default: one, in "
        "this process)",
        "workers",
    ] = None
    metric_names: Annotated[
        MetricNames,
        "names in /metrics; vllm: vLLM's names where it has the same metric, for routers that know only "
        "those",
    ] = "orca"
    latency_budget: Annotated[
        float | None,
        "maximum seconds between two tokens of a request at which /metrics predicts the capacity; on a CPU "
        "this adds some seconds of measurement to the start (default: none, a full batch of a known GPU)",
        check_timeout,
    ] = None
    predicted_context: Annotated[
        int | None,
        "cached tokens of a request for which the capacity is predicted (default: half the model's "
        "positions, at most 1024)",
    ] = None
    kv_events: Annotated[
        str | None,
        "ZeroMQ address for events of the prefix cache, in vLLM's format; one such as tcp://*:5557 is bound, "
        "others are connected to; needs the extra kv-events (default: no events)",
    ] = None
    kv_events_replay: Annotated[
        str | None, "ZeroMQ address at which subscribers request events that they missed (default: none)"
    ] = None
    kv_events_topic: Annotated[str, "topic of the events, such as kv@POD@MODEL (default: empty)"] = ""
    prefix_hash_seed: Annotated[
        str,
        "seed of the prefix cache's block hashes; give all replicas of a router the same (default: empty)",
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kv_events", "kv_events_replay"):
            address = getattr(self, name)
            if address is not None and "://" not in address:
                raise ConfigError(f"{name} is {address!r}; it must be an address such as tcp://*:5557")
        if self.kv_events is None and self.kv_events_replay is not None:
            raise ConfigError("kv_events_replay repeats events; give the address of kv_events too")
