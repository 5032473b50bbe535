"""Starts the server of `orca serve`, waits for a signal, and drains."""

import asyncio
import json
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.shape import serving_buckets
from orca_jax.service.follower import CheckpointFollower
from server.commands.endpoints import Endpoints
from server.commands.loading import load_served, summary
from server.commands.notes import Notes
from server.commands.router_view import RouterView
from server.commands.stop_signals import Stopped, StopSignals, in_daemon_thread
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.access_log import configure_logging
from server.metrics.metrics import Metrics
from server.process.log_writer import LogStream, LogWriter
from server.process.watchdog import Watchdog
from server.settings.serve_settings import ServeSettings
from server.tracing.tracing import tracing_to
from server.web.feed import LiveView

if TYPE_CHECKING:
    from orca_jax import LLM

_LOG_SECONDS = 2.0  # for the last log lines to be read


def serve_until_stopped(settings: ServeSettings, notes: Notes) -> int:
    """Serve until a signal; returns 0 after a drain, even if requests had to be ended."""
    # Nothing on the event loop may wait for whoever reads the log.
    log = LogWriter(sys.stderr.fileno())
    notes.write_to(LogStream(log, sys.stderr.fileno()))
    configure_logging(settings.endpoint.access_log, log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_serve(settings, notes, log))
        except Stopped as stopped:
            notes("stopped while the model was loading")
            log.close(_LOG_SECONDS)
            os._exit(128 + stopped.signal)  # the loading thread cannot be stopped
        finally:
            log.close(_LOG_SECONDS)


async def _serve(settings: ServeSettings, notes: Notes, log: LogWriter) -> int:
    options = settings.endpoint
    stop = StopSignals(end_with_stdin=options.end_with_stdin)
    gateway = Gateway(request_timeout=options.request_timeout)
    watchdog = Watchdog(gateway.loop)
    metrics = Metrics(gateway, settings.routing.metric_names, log=log, watchdog=watchdog)
    tracing = tracing_to(options.otlp_traces_endpoint, os.environ)
    endpoints = Endpoints(
        gateway,
        options,
        api_keys=settings.api_keys,
        admin_keys=settings.admin_keys,
        metrics=metrics,
        live_view=LiveView.of(gateway, settings, watchdog),
        tracing=tracing,
    )
    follower: CheckpointFollower | None = None
    with closing(tracing) if tracing is not None else nullcontext(), closing(RouterView(settings)) as view:
        # Before reading the weights, so that a port in use is reported at once; as for those of the view.
        await endpoints.start()
        try:
            notes(f"loading; {endpoints.http_url}/ready answers 200 when done")
            llm, model = await stop.unless(in_daemon_thread(lambda: load_served(settings, notes)))
            await stop.unless(in_daemon_thread(lambda: view.open(llm, model, metrics, notes)))
            if tracing is not None:
                tracing.start(model)
            await endpoints.open(model)
            if options.follow is not None:
                follower = CheckpointFollower(options.follow, llm.controls, on_event=notes)
                follower.start()
            watchdog.start()  # loading holds the GIL while JAX is imported
            keyed = settings.api_keys.required
            show_banner(notes, llm, model, endpoints, keyed=keyed, template_file=options.chat_template)
            await stop.first.wait()
            await _drain(endpoints, options.drain_timeout, stop, notes)
        finally:
            watchdog.stop()
            if follower is not None:
                await asyncio.to_thread(follower.close)
            await endpoints.stop()
    await asyncio.to_thread(llm.close)
    return 0


async def _drain(endpoints: Endpoints, timeout: float, stop: StopSignals, notes: Notes) -> None:
    if endpoints.n_live:
        running = f"{endpoints.n_live} requests are running and have up to {timeout:g} seconds"
        notes(f"shutting down; {running} (signal again to end them now)")
    drain = asyncio.create_task(endpoints.drain(timeout))
    hurry = asyncio.create_task(stop.second.wait())
    await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not drain.done():
        drain.cancel()
        await asyncio.wait([drain])
        drain = asyncio.create_task(endpoints.drain(0))
    n_ended = await drain
    notes(f"{n_ended} requests had to be ended" if n_ended else "all requests are done")


def show_banner(
    notes: Notes,
    llm: "LLM",
    model: ServedModel,
    endpoints: Endpoints,
    *,
    keyed: bool,
    template_file: Path | None = None,
) -> None:
    """Print the model, the addresses, the limits, and a first request.

    `keyed` says that requests need an API key; `template_file` replaces the model's.
    """
    serving = model.serving
    sizes = serving_buckets(serving)
    for name, value in (
        ("model", f"{model.name} ({summary(llm)})"),
        ("length", _length(model.config)),
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


def _length(config: ModelConfig) -> str:
    if config.is_bidirectional:
        return f"{config.n_positions - 1} tokens of input"
    return f"{config.n_positions} tokens, input and output together"


def _end_tokens(model: ServedModel) -> str:
    """The end-of-sequence tokens, by id and name."""
    names = list[str]()
    for token_id in model.config.eos_token_ids:
        name = None if model.tokenizer is None else model.tokenizer.token_name(token_id)
        names.append(str(token_id) if name is None else f"{token_id} {name}")
    return f"at {', '.join(names)}" if names else "at no token"


def chat_line(model: ServedModel, template_file: Path | None) -> str:
    """The source of the chat template, and the formats of tool calls and reasoning."""
    if model.config.only_pools:
        return "off: the model makes embeddings" if not model.config.ranker else "off: the model ranks texts"
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
    """A command to paste into a shell: what the model can, a chat rather than a completion."""
    body: dict[str, Any] = {"model": model.name}
    if model.config.only_pools:
        path, text = "embeddings", "In the beginning" if model.tokenizer is not None else [1, 2, 3]
        body["input"] = text
        if model.config.ranker and model.tokenizer is not None:
            path = "rerank"
            body = {"model": model.name, "query": "beginnings", "documents": [text, "At the end"]}
    elif model.can_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Say hello."}]
    else:
        path, body["prompt"] = "completions", "In the beginning" if model.tokenizer is not None else [1, 2, 3]
    insecure = " --insecure" if url.startswith("https") else ""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    body |= {} if model.config.only_pools else {"max_tokens": 32}
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl{insecure} {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{quoted}'"
