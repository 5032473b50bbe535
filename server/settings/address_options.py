"""The options of the endpoints' addresses: where they listen, under what name, and who may come in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

# Those of server.gateway.tool_formats.table; a test compares.
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


class Bounds(NamedTuple):
    """The smallest and largest value of a whole number."""

    low: int
    high: int


_PORT = Bounds(0, 65535)


@dataclass(frozen=True, kw_only=True, slots=True)
class AddressOptions:
    """A part of EndpointOptions, which checks it."""

    host: Annotated[str, "address to listen on; 0.0.0.0 for every interface", "addresses"] = "127.0.0.1"
    port: Annotated[int, "port for HTTP; 0 picks a free one", "addresses", _PORT] = 8000
    grpc_port: Annotated[
        int | None, "port for gRPC; 0 picks a free one, 'none' turns gRPC off", "addresses", _PORT
    ] = 8001
    served_model_name: Annotated[
        str | None, "the model's name in the API (default: its own name)", "model and engine"
    ] = None
    chat_template: Annotated[
        Path | None, "file with a Jinja chat template (default: the checkpoint's)", "model and engine"
    ] = None
    tool_format: Annotated[
        ToolFormatName,
        "how the model writes tool calls (docs/tools.md); auto: from the chat template; none: they are text",
        "model and engine",
    ] = "auto"
    reasoning_format: Annotated[
        ReasoningFormatName,
        "how the model writes its reasoning; auto: from the chat template; none: it is text",
        "model and engine",
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
    ssl_certfile: Annotated[Path | None, "certificate chain (PEM), for TLS on both endpoints", "security"] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, "its private key (PEM)", "security"] = None
