"""Assembles the HTTP endpoint: the routes and the middleware that every request passes through."""

from functools import cache, partial

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import orca_jax
from server.batches.service import Batches
from server.gateway.gateway import Gateway
from server.http import admin, live, models, status, tokenization
from server.http.authentication import DOCUMENT, Authentication, OriginCheck
from server.http.batches import batches as batch_routes
from server.http.batches import files
from server.http.batches.in_process import InProcess
from server.http.bodies import json_text
from server.http.bodies.errors import handle_errors
from server.http.connections.body_limit import BodyLimit, Upload
from server.http.direct_routes import DirectRoutes
from server.http.fields.strict import HEADER
from server.http.generation import chat, completions
from server.http.messages import messages
from server.http.observation import Observation
from server.http.openapi import describe, document
from server.http.pages import pages_router
from server.http.relevance import embeddings, score
from server.http.responses import responses, stored
from server.http.responses.store import ResponseStore
from server.metrics.metrics import Metrics
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from server.tracing.tracing import Tracing
from server.web.feed import LiveView

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
    `batches`, /v1/files and /v1/batches answer that they are off; with it, this application answers the
    batches' lines.
    """
    admin_keys = admin_keys or ApiKeys()
    app = FastAPI(
        title="orca_jax",
        summary="A serving engine for language models",
        description=_DESCRIPTION,
        version=orca_jax.__version__,
        openapi_url=None,  # see openapi.py
        docs_url=None,  # FastAPI's viewers load code from another host; see pages.py
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.options = options
    app.state.metrics = metrics
    app.state.responses = ResponseStore(
        max_responses=options.max_stored_responses,
        max_bytes=options.max_stored_bytes,
        seconds=options.stored_response_seconds,
    )
    app.state.methods = dict[str, set[str]]()
    generating = (completions, chat, responses, stored, messages)
    for routes in (*generating, embeddings, score, models, tokenization, status):
        _include(app, routes.router)
    if admin_keys.required:
        _include(app, admin.router)
        _include(app, admin.adapters)
    if options.pages:
        _include(app, pages_router())
    if options.pages and live_view is not None:
        app.state.live = live_view
        _include(app, live.router)
    uploads = {}
    if batches is None:
        _include(app, batch_routes.off_router())
    else:
        app.state.batches, app.state.fingerprint = batches, api_keys.fingerprint
        batches.read_members = json_text.members
        batches.answer = InProcess(app, gateway, tenant_of=api_keys.name_of).answer
        _include(app, files.router)
        _include(app, batch_routes.router)
        uploads = {files.router.prefix: Upload(files.most_bytes(options.batch_bytes), files.UPLOAD_SECONDS)}
    handle_errors(app)
    app.openapi = cache(partial(describe, app, keyed=api_keys.required))
    app.state.document = None  # made at the first request
    app.add_route(DOCUMENT, document, include_in_schema=False)
    bounds = {"max_bytes": options.max_body_bytes, "seconds": options.body_timeout}
    direct = DirectRoutes(app, (*(routes.router for routes in generating), embeddings.router, score.router))
    limited = BodyLimit(direct, **bounds, uploads=uploads)
    authenticated = Authentication(limited, api_keys=api_keys, admin_keys=admin_keys)
    open_app: ASGIApp = OriginCheck(authenticated, allowed=options.origins)
    if options.origins:  # outside authentication: a browser's preflight request has no key
        open_app = CORSMiddleware(
            open_app,
            allow_origins=options.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[HEADER, "x-request-id", "request-id", "retry-after"],
        )
    return Observation(
        open_app,
        access_log=options.access_log,
        log_probes=options.log_probes,
        metrics=metrics,
        tracing=tracing,
    )


def _include(app: FastAPI, router: APIRouter) -> None:
    """Add routes, and note the methods of each path for 405 responses."""
    app.include_router(router)
    for route in router.routes:
        if isinstance(route, APIRoute):
            app.state.methods.setdefault(route.path, set()).update(route.methods or ())
