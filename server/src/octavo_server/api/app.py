"""Builds the HTTP application around one engine client: routes, error handlers and middleware.

FastAPI provides routing and documentation; bodies, errors and responses are handled by this package. `ApiServer` serves
the application, and stops with a non-zero exit code when the engine core has died.
"""

import asyncio
import hashlib
import logging
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.wire.errors import OctavoError
from octavo_engine.wire.sampling import DRAW_VERSION
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.access_log import UsageLog
from octavo_server.api import (
    adapters,
    admin,
    chat,
    chat_batch,
    completions,
    embeddings,
    health,
    invocations,
    kv,
    models,
    render,
    scoring,
    tokens,
)
from octavo_server.api.context import ApiContext
from octavo_server.api.dialects import messages, responses
from octavo_server.api.openapi import document
from octavo_server.config import ServerConfig, TlsSettings
from octavo_server.http.access import AccessMiddleware, access_policy
from octavo_server.http.lifecycle import DrainMiddleware
from octavo_server.http.request_id import RequestIdMiddleware, id_headers
from octavo_server.http.responses import log_failure
from octavo_server.http.server import DrainingServer
from octavo_server.http_metrics import HttpMetricsMiddleware
from octavo_server.json_responses import error_reply
from octavo_server.kv.card import model_card, write_card
from octavo_server.kv.publisher import KVPublisher
from octavo_server.openai.errors import MalformedRequest, WrongRunner
from octavo_server.openai.rendering import RenderDefaults
from octavo_server.supervise import cancel_tasks, supervised
from octavo_server.telemetry import Telemetry
from octavo_server.watchdog import StallDetector

if TYPE_CHECKING:
    from octavo_server.tracing import RequestTracer


#: Routes of text models and of embedding models. On a server of the other kind they answer 404 with the reason.
GENERATING = (chat, chat_batch, completions, responses, messages, invocations, render)
EMBEDDING = (embeddings, scoring)
MODULES = (
    *GENERATING,
    *EMBEDDING,
    models,
    tokens,
    health,
    adapters,
    admin,
    kv,
)
logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 1.0


def build_app(client: AsyncLLM, config: ServerConfig, tracer: "RequestTracer | None" = None) -> FastAPI:
    shows_docs = not config.disable_fastapi_docs
    app = FastAPI(
        title="Octavo",
        version=version("octavo-server"),
        openapi_url="/openapi.json" if shows_docs else None,
    )
    app.state.context = _context(client, config)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    _add_routes(app, client)
    for kind in (OctavoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_layers(app, config, app.state.context.telemetry)
    if tracer is not None:
        _trace(app, tracer)
    return app


def _add_routes(app: FastAPI, client: AsyncLLM) -> None:
    is_embedding, name = client.frontend.model.pooling is not None, client.config.model
    reason = f"{name} generates text: start the server with --runner pooling"
    if is_embedding:
        reason = f"{name} is an embedding model: send texts to POST /v1/embeddings"

    async def refuse(request: Request) -> None:
        raise WrongRunner(f"{request.scope['path']} is not served: {reason}.")

    for module in MODULES:
        is_absent = module in (GENERATING if is_embedding else EMBEDDING)
        app.include_router(
            module.router, dependencies=[Depends(refuse)] if is_absent else (), include_in_schema=not is_absent
        )


def _context(client: AsyncLLM, config: ServerConfig) -> ApiContext:
    telemetry = Telemetry(
        model_name=config.model_name,
        config=client.config,
        ready=client.ready_info,
        stats=lambda: client.stats,
        sleeping=lambda: client.sleeping_tags,
        prefix=config.metrics_prefix,
        adapters=lambda: client.adapters,
    )
    client.on_stats = telemetry.record_step
    client.on_block_lives = telemetry.record_block_lives
    weights = hashlib.sha256(client.ready_info.weights_fingerprint.encode()).hexdigest()[:8]
    fingerprint = f"octavo-{version('octavo-server')}-draw{DRAW_VERSION}-{weights}"
    stall = StallDetector(config.health_stall_timeout)
    defaults = RenderDefaults(
        kwargs=config.default_chat_template_kwargs, excludes_unused_tools=config.exclude_tools_when_tool_choice_none
    )
    card = model_card(client, config.served_model_names, cache_isolation=config.cache_isolation, defaults=defaults)
    publisher = KVPublisher(
        client.ready_info,
        config.served_model_names,
        card=card.fingerprint,
        has_prefix_cache=client.config.enable_prefix_caching,
    )
    if client.config.kv_stream:
        client.on_kv, client.on_add = publisher.publish, publisher.announce_request
        client.on_adapters = publisher.set_adapters
    return ApiContext(
        client=client,
        config=config,
        telemetry=telemetry,
        fingerprint=fingerprint,
        stall=stall,
        kv=publisher,
        model_card=write_card(card),
        render_defaults=defaults,
        usage_log=None if config.usage_log is None else UsageLog(config.usage_log),
    )


def _add_layers(app: FastAPI, config: ServerConfig, telemetry: Telemetry) -> None:
    """Add the middleware; the last one added is the outermost."""
    app.add_middleware(AccessMiddleware, policy=access_policy(config, is_router_only=config.router_only))
    app.add_middleware(DrainMiddleware, lifecycle=app.state.context.lifecycle)
    app.add_middleware(config.cors.wrap_app)
    app.add_middleware(
        HttpMetricsMiddleware,
        metrics=telemetry.http,
        routes=[route for module in MODULES for route in module.router.routes],
    )
    app.add_middleware(RequestIdMiddleware)
    root_path = config.root_path.rstrip("/")
    if root_path:
        app.add_middleware(_with_root_path, root_path=root_path)


def _with_root_path(app: ASGIApp, root_path: str) -> ASGIApp:
    """Set the prefix that a proxy has stripped, for the OpenAPI document and links; no route depends on it."""

    async def with_prefix(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "root_path": root_path}, receive, send)

    return with_prefix


def _trace(app: FastAPI, tracer: "RequestTracer") -> None:
    """Attach the tracer. The module `tracing` is imported here, so that a server without a tracer never loads it."""
    from octavo_server.tracing import TraceContextMiddleware

    app.state.context.telemetry.on_request_end = tracer.record
    app.add_middleware(TraceContextMiddleware)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Turn an error into a response with the header X-Request-Id, as unexpected errors bypass `RequestIdMiddleware`."""
    request_id = request.scope["state"]["request_id"]
    log_failure(error, request_id)
    if isinstance(error, RequestValidationError):
        error = MalformedRequest(str(error))
    path = request.scope["path"]
    return error_reply(error, id_headers(path, request_id), path=path)


def _tls_options(tls: TlsSettings) -> dict[str, Any]:
    """Settings of `uvicorn.Config`."""
    if tls.ssl_certfile is None:
        return {}
    ciphers = {} if tls.ssl_ciphers is None else {"ssl_ciphers": tls.ssl_ciphers}
    return {
        "ssl_certfile": tls.ssl_certfile,
        "ssl_keyfile": tls.ssl_keyfile,
        "ssl_ca_certs": None if tls.ssl_ca_certs is None else str(tls.ssl_ca_certs),
        "ssl_cert_reqs": tls.ssl_cert_reqs,
        **ciphers,
    }


class ApiServer(DrainingServer):
    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._context: ApiContext = app.state.context
        http = self._context.telemetry.http
        super().__init__(
            app, config, self._context.lifecycle, on_refused_head=http.record_refused_head, **_tls_options(config.tls)
        )
        self.engine_died = False
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks.append(supervised("updating the health", self._update_health))

    async def on_tick(self, counter: int) -> bool:
        """Stop the server if the engine core has died. An exception here would end the server."""
        if self._context.client.is_dead:
            self.engine_died = True
            self.should_exit = True
            logger.error("the process of the engine core has ended; stopping the server")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.kv.close("the replica is shutting down")
        await super().shutdown(sockets)
        await cancel_tasks(self._tasks)

    async def _update_health(self) -> None:
        while True:
            self._context.update_health()
            await asyncio.sleep(HEALTH_EVERY_S)
