"""The banner of `orca serve` when it is ready: the model, the addresses, the limits, and a first request."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_jax.iteration.shape import serving_buckets
from server.commands.endpoints import Endpoints
from server.commands.loading import summary
from server.commands.notes import Notes
from server.gateway.served_model import ServedModel

if TYPE_CHECKING:
    from orca_jax import LLM


def show(
    notes: Notes,
    llm: "LLM",
    model: ServedModel,
    endpoints: Endpoints,
    *,
    keyed: bool,
    template_file: Path | None = None,
) -> None:
    """Print the banner. `keyed` says that requests need an API key; `template_file` replaces the model's."""
    serving = model.serving
    sizes = serving_buckets(serving)
    for name, value in (
        ("model", f"{model.name} ({summary(llm)})"),
        ("length", f"{model.config.n_positions} tokens, input and output together"),
        (
            "n_slots",
            f"{serving.n_slots} tokens of keys and values, {serving.block_size} a block",
        ),
        ("stages", llm.stages),
        ("attention", llm.attention),
        ("max_bs", f"{serving.max_batch_size} requests in one iteration"),
        ("buckets", f"{len(sizes)}, from {sizes[0]} to {sizes[-1]} tokens"),
        ("end", _end_tokens(model)),
        ("chat", chat_line(model, template_file)),
        ("defaults", str(llm.generation_defaults) or "the API's (no generation_config.json)"),
        ("HTTP", endpoints.http_url),
        ("pages", endpoints.pages),
        ("gRPC", endpoints.grpc_address or "off"),
        ("API key", "required" if keyed else "not required: anyone who reaches the port can use it"),
    ):
        notes(f"{name:<11}{value}", style="")
    notes("ready; a first request:", style="bold")
    notes(first_request(model, endpoints.http_url, keyed=keyed), style="")


def _end_tokens(model: ServedModel) -> str:
    """The end-of-sequence tokens, by id and name."""
    names = list[str]()
    for token_id in model.config.eos_token_ids:
        name = None if model.tokenizer is None else model.tokenizer.token_name(token_id)
        names.append(str(token_id) if name is None else f"{token_id} {name}")
    return f"at {', '.join(names)}" if names else "at no token"


def chat_line(model: ServedModel, template_file: Path | None) -> str:
    """The source of the chat template, and the formats of tool calls and reasoning."""
    if model.chat_template is None:
        return "no chat template: /v1/completions alone; --chat-template FILE gives one"
    if model.has_encoder or model.tokenizer is None:
        why = "an encoder reads the prompt" if model.has_encoder else "the model has no tokenizer"
        return f"off: {why}"
    template = "the model's template" if template_file is None else f"the template {template_file}"
    tools = "text" if model.tool_format is None else model.tool_format.name
    reasoning = "text" if model.reasoning_format is None else model.reasoning_format.name
    return f"by {template}; tool calls: {tools}; reasoning: {reasoning}"


def first_request(model: ServedModel, url: str, *, keyed: bool) -> str:
    """A command to paste into a shell: a chat where the model can, else a completion."""
    body: dict[str, Any] = {"model": model.name}
    if model.can_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Say hello."}]
    else:
        path, body["prompt"] = "completions", "In the beginning" if model.tokenizer is not None else [1, 2, 3]
    insecure = " --insecure" if url.startswith("https") else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    quoted = json.dumps(body | {"max_tokens": 32}).replace("'", "'\\''")
    return f"curl{insecure} {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{quoted}'"
