"""`Router`: the composition of one worker. Requests for replicas go straight to the `Proxy`; the rest is FastAPI's."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.http.auth import BearerAuth
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.middleware import RequestId
from octavo_server.http.trust import SentSecret, router_secrets
from octavo_server.http.watched import InFlight
from octavo_server.keys import KeyRing
from octavo_server.replies import error_reply
from octavo_server.router import service
from octavo_server.router.admin import AdminContext, build_admin
from octavo_server.router.breaker import Breakers
from octavo_server.router.endpoint import Discovery
from octavo_server.router.fleet import Fleet
from octavo_server.router.follower import FollowSettings
from octavo_server.router.forward import Forwarder
from octavo_server.router.operators import Operators
from octavo_server.router.picker import Picker
from octavo_server.router.prefix_index import PrefixIndex
from octavo_server.router.proxy import KINDS, OTHERS, Proxy
from octavo_server.router.readers import Readers
from octavo_server.router.replica import Replica
from octavo_server.router.report import Reporter, Waiting
from octavo_server.router.settings import RouterSettings
from octavo_server.router.state_events import StateFeed
from octavo_server.router.team import Team
from octavo_server.router.track import Telemetry
from octavo_server.router.upstream import Upstream
from octavo_server.router.waiting_room import WaitingRoom
from octavo_server.router.workers import Workers

if TYPE_CHECKING:
    from octavo_server.router.spans import RouteTracer

POKE_EVERY_S = 0.25
#: How long what a replica has begun may be silent once it is known not to answer any more.
LOST_STREAM_S = 5.0


def _soon(act: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(act)


class Router:
    """An ASGI application. Belongs to one event loop, from `start` to `stop`."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        team: Team | None = None,
        tracer: "RouteTracer | None" = None,
    ) -> None:
        self.team = team or Team()
        self.settings = settings
        self._secret = SentSecret(settings.router_secrets, settings.router_secret_file)
        self.in_flight = InFlight()
        self.lifecycle = Lifecycle(self.in_flight, timeout_s=settings.drain_timeout_s)
        self.index = PrefixIndex(max_entries=settings.max_index_entries)
        self.telemetry = Telemetry(tracer=tracer)
        self.picker = Picker(self.index, clock=time.monotonic, soon=_soon)
        self.upstream = Upstream(connect_timeout_s=settings.forward.connect_timeout_s)
        follow = FollowSettings(secret=self._secret, key=settings.replica_key)
        self.fleet = Fleet(follow, discovery, self.index)
        self.readers = Readers(self.fleet, follow.headers)
        self.fleet.on_change.append(self._changed)
        self.fleet.on_heard.append(self.picker.heard)
        forward = settings.forward
        self.breakers = Breakers(
            max_failures=forward.breaker_failures, open_s=forward.breaker_open_s, clock=time.monotonic
        )
        self.room = WaitingRoom(max_waiting=forward.max_queued_requests, observe=self.telemetry.metrics.waited)
        reporter = Reporter(
            telemetry=self.telemetry,
            index=self.index,
            replicas=lambda: self.fleet.replicas,
            waiting=self._waiting,
            breaker=self.breakers.state,
            clock=time.monotonic,
            accepts=lambda: self.lifecycle.state == "accepting",
        )
        self.fleet.on_change.append(reporter.changed)
        self.workers = Workers(reporter, self.team.folder, self.team.number)
        self.feed = StateFeed(self.workers.state)
        self.lifecycle.on_change = self.feed.poke
        ring = KeyRing(settings.api_keys, settings.api_key_files) if settings.needs_key else None
        self._proxy = self._proxied(ring)
        self._rest = self._admin(ring)
        self._paths = frozenset(KINDS) | OTHERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            await self._proxy(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def start(self) -> None:
        await self.workers.start()
        await self.readers.start()
        await self.fleet.start()
        self._tasks = [asyncio.create_task(self.upstream.watch()), asyncio.create_task(self._poke())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.fleet.stop()
        await self.readers.stop()
        await self.workers.stop()
        self.upstream.close()

    def _proxied(self, ring: KeyRing | None) -> Proxy:
        forwarder = Forwarder(
            fleet=self.fleet,
            picker=self.picker,
            upstream=self.upstream,
            breakers=self.breakers,
            room=self.room,
            limits=self.settings.forward,
        )
        return Proxy(
            settings=self.settings,
            fleet=self.fleet,
            readers=self.readers.of,
            forwarder=forwarder,
            telemetry=self.telemetry,
            lifecycle=self.lifecycle,
            in_flight=self.in_flight,
            ring=ring,
            secret=self._secret,
        )

    def _admin(self, ring: KeyRing | None) -> ASGIApp:
        secrets = router_secrets(self.settings.router_secrets, self.settings.router_secret_file)
        operators = Operators(keys=ring, secrets=secrets)
        app = build_admin(AdminContext(workers=self.workers, feed=self.feed, operators=operators))
        app.state.service = service.ServiceContext(
            fleet=self.fleet,
            lifecycle=self.lifecycle,
            team=self.team,
            operators=operators,
            created=int(time.time()),
        )
        app.include_router(service.router)
        app.add_exception_handler(HTTPException, _answer_error)
        return _layered(app, ring)

    def _changed(self, replica: Replica) -> None:
        origin = self.upstream.origin(replica.url)
        if replica.state == "connecting":
            origin.lost(LOST_STREAM_S)
        elif replica.state == "exact":
            self.breakers.succeeded(replica.name)
        elif replica.state == "gone":
            self.upstream.forget(replica.url)
            self.breakers.succeeded(replica.name)
        self.room.poke()
        self.feed.poke()

    async def _poke(self) -> None:
        """For what comes with time alone: a breaker that lets a probe through, a drain that another worker was told."""
        while True:
            await asyncio.sleep(POKE_EVERY_S)
            self.room.poke()
            self._drain_with_others()

    def _drain_with_others(self) -> None:
        drains = self.team.is_draining
        if drains and self.lifecycle.state == "accepting":
            self.lifecycle.drain()
        elif drains is False and self.lifecycle.state == "draining":
            self.lifecycle.resume()

    def _waiting(self) -> Waiting:
        counts = self.room.of_model()
        held = {model: count for model, count in counts.items() if not self.fleet.routable(model)}
        return Waiting(sum(counts.values()) - sum(held.values()), held)


def _layered(app: FastAPI, ring: KeyRing | None) -> ASGIApp:
    """The last one is the outermost."""
    layered: ASGIApp = app
    if ring is not None:
        layered = _Guard(layered, BearerAuth(layered, ring))
    layered = CORSMiddleware(layered, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return RequestId(layered)


class _Guard:
    """Clients' keys for the routes of clients; the operator's routes ask for theirs themselves."""

    def __init__(self, app: ASGIApp, guarded: ASGIApp) -> None:
        self._app = app
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_client = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await (self._guarded if is_client else self._app)(scope, receive, send)


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_reply(error)
