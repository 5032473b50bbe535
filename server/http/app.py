"""Assembles the HTTP endpoint: the routes and the middleware that every request passes through."""

from functools import cache, partial

from fastapi import FastAPI
from starlette.types import ASGIApp

import orca_jax
from server.batches.service import Batches
from server.gateway.gateway import Gateway
from server.http import admin, live, models, status, tokenization
from server.http.authentication import Authentication
from server.http.batches import batches as batch_routes
from server.http.batches import files
from server.http.batches.in_process import InProcess
from server.http.batches.state import off_router
from server.http.bodies.errors import handle_errors
from server.http.connections.body_limit import BodyLimit, Upload
from server.http.generation import chat, completions
from server.http.observation import Observation
from server.http.openapi import describe
from server.http.pages import pages_router
from server.http.relevance import embeddings, rerank, score
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.options import EndpointOptions
from server.tracing.tracing import Tracing
from server.web.live_view import LiveView

_DESCRIPTION = (
    "OpenAI's API for an engine with continuous batching: iteration-level scheduling and selective batching "
    "(ORCA, OSDI 2022)."
)


def create_app(
    gateway: Gateway,
    options: EndpointOptions,
    *,
    api_keys: ApiKeys,
    admin_keys: ApiKeys | None = None,
    metrics: Metrics,
    live_view: LiveView | None = None,
    batches: Batches | None = None,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """The endpoint as an ASGI application, without ASGI lifespan events.

    Without `admin_keys` there are no routes under /admin, and without `live_view` none under /live/. Without
    `batches`, which gets what answers its lines, /v1/files and /v1/batches say that they are off.
    """
    admin_keys = admin_keys or ApiKeys()
    app = FastAPI(
        title="orca_jax",
        summary="A serving engine for language models",
        description=_DESCRIPTION,
        version=orca_jax.__version__,
        docs_url=None,  # FastAPI's viewers load code from another host; see pages.py
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.options = options
    app.state.metrics = metrics
    for routes in (completions, chat, embeddings, score, rerank, models, tokenization, status):
        app.include_router(routes.router)
    if admin_keys.required:
        app.include_router(admin.router)
    if options.pages:
        app.include_router(pages_router())
    if options.pages and live_view is not None:
        app.state.live = live_view
        app.include_router(live.router)
    uploads = {}
    if batches is None:
        app.include_router(off_router())
    else:
        app.state.batches, app.state.fingerprint = batches, api_keys.fingerprint
        batches.answer = InProcess(app, gateway, tenant_of=api_keys.name_of).answer
        app.include_router(files.router)
        app.include_router(batch_routes.router)
        uploads = {files.router.prefix: Upload(files.most_bytes(options.batch_bytes), files.UPLOAD_SECONDS)}
    handle_errors(app)
    app.openapi = cache(partial(describe, app, keyed=api_keys.required))
    bounds = {"max_bytes": options.max_body_bytes, "seconds": options.body_timeout}
    limited = BodyLimit(app, **bounds, uploads=uploads)
    authenticated = Authentication(limited, api_keys=api_keys, admin_keys=admin_keys)
    return Observation(authenticated, access_log=options.access_log, metrics=metrics, tracing=tracing)
