"""What `orca serve` prints when it is ready: the model, the addresses, the limits, and a first request."""

import json
from typing import TYPE_CHECKING

from orca_jax.iteration.shape import serving_buckets
from server.commands.endpoints import Endpoints
from server.commands.loading import summary
from server.commands.notes import Notes
from server.gateway.served_model import ServedModel

if TYPE_CHECKING:
    from orca_jax import LLM


def show(notes: Notes, llm: "LLM", model: ServedModel, endpoints: Endpoints, *, keyed: bool) -> None:
    """Print the banner; `keyed`: requests need an API key."""
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
        ("defaults", str(llm.generation_defaults) or "the API's (no generation_config.json)"),
        ("HTTP", endpoints.http_url),
        ("pages", endpoints.pages),
        ("gRPC", endpoints.grpc_address or "off"),
        ("API key", "required" if keyed else "not required: anyone who reaches the port can use it"),
    ):
        notes(f"{name:<11}{value}", style="")
    notes("ready; a first request:", style="bold")
    notes(_first_request(model, endpoints.http_url, keyed=keyed), style="")


def _end_tokens(model: ServedModel) -> str:
    """The end-of-sequence tokens, by id and name."""
    names = list[str]()
    for token_id in model.config.eos_token_ids:
        name = None if model.tokenizer is None else model.tokenizer.token_name(token_id)
        names.append(str(token_id) if name is None else f"{token_id} {name}")
    return f"at {', '.join(names)}" if names else "at no token"


def _first_request(model: ServedModel, url: str, *, keyed: bool) -> str:
    """A command to paste into a shell."""
    prompt: str | list[int] = "In the beginning" if model.tokenizer is not None else [1, 2, 3]
    body = json.dumps({"model": model.name, "prompt": prompt, "max_tokens": 32})
    insecure = " --insecure" if url.startswith("https") else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    quoted = body.replace("'", "'\\''")
    return f"curl{insecure} {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{quoted}'"
