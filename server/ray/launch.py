"""The program that `orca serve --replicas N` runs: `python -m server.ray.launch FLAGS`.

FLAGS is a JSON object. The program starts Ray on this machine, or joins the Ray at RAY_ADDRESS, and starts
Serve there.
"""

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

import ray
from ray import serve

from orca_jax.errors import EngineError, OrcaError
from server.commands.notes import Notes
from server.commands.stop_signals import Stopped
from server.errors import UsageError
from server.process.addresses import bound_socket, in_url
from server.ray.app import CLOSE_SECONDS, application
from server.ray.settings import ReplicaOptions, for_replicas
from server.settings.flags import SERVE_OPTIONS
from server.settings.serve_settings import ServeSettings, serve_settings

_APP = "orca"
_ADDRESS = "RAY_ADDRESS"
_LOOK_SECONDS = 0.1
_STORE_BYTES = 256 << 20  # Ray's object store: only bodies above 100 KB pass through it
_CONTROLLER = ("SERVE_CONTROLLER_ACTOR", "serve")  # Serve's own actor and its namespace


def main(flags: str) -> int:
    """Serve until a signal; returns the exit status."""
    notes = Notes()
    try:
        with ExitStack() as stack:
            return _run(_settings(json.loads(flags)), notes, stack)
    except Stopped as stopped:
        notes("stopped before all requests were done, or while the engines were loading")
        return 128 + stopped.signal
    except OrcaError as error:
        print(f"orca: error: {' '.join(str(error).split())[:1000]}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2


def _settings(flags: dict[str, Any]) -> ServeSettings:
    """Read the settings from the flags, in which paths are strings and tuples are lists."""
    parse = {option.name: option.parse for option in SERVE_OPTIONS}
    values = {
        name: parse[name](",".join(value) if isinstance(value, list) else str(value))
        if name in parse and value is not None
        else value
        for name, value in flags.items()
    }
    return serve_settings(argparse.Namespace(**values), os.environ)


def _run(settings: ServeSettings, notes: Notes, stack: ExitStack) -> int:
    for note in settings.notes:
        notes(note)
    n_replicas = settings.routing.replicas
    assert n_replicas is not None
    replicas = ReplicaOptions(num_replicas=n_replicas)
    settings = for_replicas(settings, replicas, ("host", "port"))
    endpoint = settings.endpoint
    with bound_socket(endpoint.host, endpoint.port, flag="--port") as listener:  # raises if the port is taken
        port = listener.getsockname()[1]
    url = f"http://{in_url(endpoint.host)}:{port}"
    signals = _Signals()
    _join_ray(replicas, stack)
    signals.take()  # Ray has installed another handler
    app = application(settings, replicas)  # it asks Ray whether there are GPUs
    serve.start(http_options={"host": endpoint.host, "port": port})
    stack.callback(serve.shutdown)
    notes(f"loading; {url}/ready answers 200 when done")
    try:
        serve.run(app, name=_APP)
    except RuntimeError as error:  # raised by Ray, with the reason for which a replica failed
        raise EngineError(str(error)) from error
    name = settings.model_name
    notes(f"{'model':<11}{name}, {n_replicas} engines", style="")
    notes(f"{'HTTP':<11}{url}  (its pages: {url}/docs)", style="")
    notes(f"{'gRPC':<11}off", style="")
    notes(f"{'API key':<11}{'required' if settings.api_keys.required else 'not required'}", style="")
    body = json.dumps({"model": name, "prompt": "In the beginning", "max_tokens": 32})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_keys.required else ""
    notes("ready; a first request:", style="bold")
    notes(f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'", style="")
    signals.wait()
    _drain(endpoint.drain_timeout, signals, notes)
    return 0


def _join_ray(replicas: ReplicaOptions, stack: ExitStack) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(_ADDRESS)
    options: dict[str, Any] = {"logging_level": logging.WARNING}
    if not address:
        # Promise the cores that the engines ask for, so that they start even on a machine with fewer.
        wanted = math.ceil(replicas.num_replicas * replicas.cpus_per_replica)
        options |= {
            "num_cpus": max(os.cpu_count() or 1, wanted),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
    stack.callback(ray.shutdown)
    try:
        ray.init(address=address or "local", **options)
    except ConnectionError as error:
        raise EngineError(f"there is no Ray at {_ADDRESS}={address}: {error}") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    name, namespace = _CONTROLLER
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return
    raise UsageError(
        f"the Ray at {_ADDRESS}={address} runs Serve already; give it the application with "
        "`serve run server.ray.app:build_app` instead"
    )


def _drain(seconds: float, signals: "_Signals", notes: Notes) -> None:
    notes(f"shutting down; running requests have up to {seconds:g} seconds (signal again to end them now)")
    signals.raise_next(True)
    deadline = time.monotonic() + seconds + 2 * CLOSE_SECONDS
    try:
        serve.delete(_APP, _blocking=False)
        while _APP in serve.status().applications and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
    except Stopped:
        notes("requests that still ran were ended")
    else:
        signals.raise_next(False)  # so that nothing interrupts the end of the processes
        notes("all requests are done")


class _Signals:
    """SIGTERM and Ctrl-C. They raise Stopped while engines load, and once more while requests end."""

    def __init__(self) -> None:
        self._raise = True
        self._came = False
        self.take()

    def take(self) -> None:
        """Handle signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self) -> None:
        """Wait for the first signal."""
        self._raise = False
        while not self._came:
            time.sleep(_LOOK_SECONDS)

    def raise_next(self, on: bool) -> None:
        """Let the next signal raise Stopped, or not."""
        self._raise = on

    def _on_signal(self, number: int, _: object) -> None:
        self._came = True
        if self._raise:
            self._raise = False  # only once, so that nothing interrupts the cleaning up
            raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
