"""Starts the server of `orca serve`, waits for a signal, and drains."""

import asyncio
import logging
import os
import sys
from contextlib import closing, nullcontext

import uvloop

from server.commands import banner
from server.commands.endpoints import Endpoints
from server.commands.loading import load_served
from server.commands.notes import Notes
from server.commands.router_view import RouterView
from server.commands.stop_signals import Stopped, StopSignals, in_daemon_thread
from server.gateway.gateway import Gateway
from server.metrics.access_log import configure_access_log
from server.metrics.metrics import Metrics
from server.process.log_writer import LogHandler, LogStream, LogWriter
from server.process.watchdog import Watchdog
from server.settings.serve_settings import ServeSettings
from server.tracing.tracing import tracing_to
from server.web.feed import LiveView

_LOG_SECONDS = 2.0  # for the last log lines to be read


def serve_until_stopped(settings: ServeSettings, notes: Notes) -> int:
    """Serve until a signal; returns 0 after a drain, even if requests had to be ended."""
    # Nothing on the event loop may wait for whoever reads the log.
    log = LogWriter(sys.stderr.fileno())
    notes.write_to(LogStream(log, sys.stderr.fileno()))
    _configure_logging(settings, log)
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
    stop = StopSignals()
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
    with closing(tracing) if tracing is not None else nullcontext(), closing(RouterView(settings)) as view:
        # Before reading the weights, so that a port in use is reported at once; as for those of the view.
        await endpoints.start()
        try:
            notes(f"loading; {endpoints.http_url}/ready answers 200 when done")
            llm, model = await stop.unless(in_daemon_thread(lambda: load_served(settings, notes)))
            await stop.unless(in_daemon_thread(lambda: view.open(llm, model, metrics, notes)))
            if tracing is not None:
                tracing.start(model)
            gateway.open(model)
            watchdog.start()  # loading holds the GIL while JAX is imported
            keyed = settings.api_keys.required
            banner.show(notes, llm, model, endpoints, keyed=keyed, template_file=options.chat_template)
            await stop.first.wait()
            await _drain(gateway, options.drain_timeout, stop, notes)
        finally:
            watchdog.stop()
            await endpoints.stop()
    await asyncio.to_thread(llm.close)
    return 0


def _configure_logging(settings: ServeSettings, log: LogWriter) -> None:
    """Write the access log as configured, and warnings and errors from everything else."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler(log, form)])
    configure_access_log(settings.endpoint.access_log, LogHandler(log))


async def _drain(gateway: Gateway, timeout: float, stop: StopSignals, notes: Notes) -> None:
    if gateway.n_live:
        running = f"{gateway.n_live} requests are running and have up to {timeout:g} seconds"
        notes(f"shutting down; {running} (signal again to end them now)")
    drain = asyncio.create_task(gateway.drain(timeout))
    hurry = asyncio.create_task(stop.second.wait())
    await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not drain.done():
        drain.cancel()
        await asyncio.wait([drain])
        drain = asyncio.create_task(gateway.drain(0))
    n_ended = await drain
    notes(f"{n_ended} requests had to be ended" if n_ended else "all requests are done")
