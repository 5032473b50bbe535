"""`orca route`: a proxy that lets some servers compute prompts and others generate."""

import argparse
import logging

import uvicorn

from server.apart.proxy import Proxy, ProxyOptions
from server.commands.notes import Notes
from server.process.addresses import bound_socket, in_url, server_url

_MOST_REQUESTS = 4096  # at the same time
_STOP_SECONDS = 30


def run(args: argparse.Namespace) -> int:
    """Run the proxy until SIGTERM or Ctrl-C."""
    options = ProxyOptions(
        prefill=[server_url(url, flag="--prefill") for url in args.prefill],
        decode=[server_url(url, flag="--decode") for url in args.decode],
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = bound_socket(args.host, args.port, flag="--port")
    server = uvicorn.Server(
        uvicorn.Config(
            Proxy(options).app(),
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_MOST_REQUESTS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
    )
    n_prefill, n_decode = len(options.prefill), len(options.decode)
    Notes()(
        f"http://{in_url(args.host)}:{listener.getsockname()[1]} routes to {n_prefill} servers of prompts "
        f"and {n_decode} that generate"
    )
    server.run(sockets=[listener])
    return 0
