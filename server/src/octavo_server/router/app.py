"""`Router`: the composition of one worker. Requests for replicas go straight to the `Proxy`; the rest is FastAPI's."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.http.access import AccessMiddleware, AccessPolicy, access_policy
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.request_id import RequestIdMiddleware
from octavo_server.http.router_secret import OutgoingSecret
from octavo_server.json_responses import error_reply
from octavo_server.router import routes
from octavo_server.router.admin_routes import AdminContext, build_admin
from octavo_server.router.balance.breaker import Breakers
from octavo_server.router.balance.picker import Picker
from octavo_server.router.balance.queue import RequestQueue
from octavo_server.router.fleet.endpoint import Discovery
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.observe.report import Reporter, Waiting
from octavo_server.router.observe.request_observer import Telemetry
from octavo_server.router.observe.state_stream import StateFeed
from octavo_server.router.observe.workers import Workers
from octavo_server.router.prompts.prompt_hashers import PromptHashers
from octavo_server.router.proxy.forward import Forwarder
from octavo_server.router.proxy.handler import KINDS, OTHERS, Proxy
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.pool import ConnectionPools
from octavo_server.router.worker_group import WorkerGroup
from octavo_server.supervise import cancel_tasks, supervised

if TYPE_CHECKING:
    from octavo_server.router.observe.spans import RouteTracer

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
        team: WorkerGroup | None = None,
        tracer: "RouteTracer | None" = None,
    ) -> None:
        self.team = team or WorkerGroup()
        self.settings = settings
        self._secret = OutgoingSecret(settings.router_secrets, settings.router_secret_file)
        self.in_flight = InFlight()
        self.lifecycle = Lifecycle(self.in_flight, timeout_s=settings.drain_timeout_s)
        self.index = PrefixIndex(max_entries=settings.max_index_entries)
        self.telemetry = Telemetry(tracer=tracer)
        self.picker = Picker(self.index, clock=time.monotonic, soon=_soon)
        self.upstream = ConnectionPools(connect_timeout_s=settings.forward.connect_timeout_s)
        follow = FollowSettings(secret=self._secret, key=settings.replica_key)
        self.fleet = Fleet(follow, discovery, self.index)
        self.readers = PromptHashers(self.fleet, follow.headers)
        self.fleet.on_change.append(self._changed)
        self.fleet.on_heard.append(self.picker.heard)
        forward = settings.forward
        self.breakers = Breakers(
            max_failures=forward.breaker_failures, open_s=forward.breaker_open_s, clock=time.monotonic
        )
        self.room = RequestQueue(max_waiting=forward.max_queued_requests, observe=self.telemetry.metrics.waited)
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
        access = access_policy(settings, admin_port=settings.admin_port)
        self._proxy = self._proxied(access)
        self._rest = self._admin(access)
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
        self._tasks = [
            supervised("closing idle connections", self.upstream.watch),
            supervised("waking the queue", self._poke),
        ]

    async def stop(self) -> None:
        await cancel_tasks(self._tasks)
        await self.fleet.stop()
        await self.readers.stop()
        await self.workers.stop()
        self.upstream.close()

    def _proxied(self, access: AccessPolicy) -> Proxy:
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
            access=access,
            cors=CorsPolicy.of(self.settings),
            secret=self._secret,
        )

    def _admin(self, access: AccessPolicy) -> ASGIApp:
        self.app = app = build_admin(AdminContext(workers=self.workers, feed=self.feed))
        app.state.service = routes.ServiceContext(
            fleet=self.fleet,
            lifecycle=self.lifecycle,
            team=self.team,
            created=int(time.time()),
        )
        app.include_router(routes.router)
        app.add_exception_handler(HTTPException, _answer_error)
        layered = CorsPolicy.of(self.settings).layer(AccessMiddleware(app, access))
        return RequestIdMiddleware(layered)

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


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_reply(error)
