"""`Router` composes one worker: `ProxyHandler` forwards requests to replicas, FastAPI serves the other routes."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.http.access import AccessMiddleware, AccessPolicy, access_policy
from octavo_server.http.body import BodyBudget
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle
from octavo_server.http.rate_limits import RateLimits
from octavo_server.http.request_id import RequestIdMiddleware
from octavo_server.http.request_threads import RequestThreads
from octavo_server.http.router_secret import OutgoingSecret
from octavo_server.http.server import DrainingServer
from octavo_server.http.tenants_file import TenantsFile
from octavo_server.json_responses import error_reply
from octavo_server.router import routes
from octavo_server.router.admin_routes import AdminContext, build_admin
from octavo_server.router.balance.balancer import Balancer
from octavo_server.router.balance.picker import Picker
from octavo_server.router.balance.queue import RequestQueue
from octavo_server.router.fleet.endpoint import Discovery
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.listed_services import ListedServices
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.observe.report import Reporter
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_server.router.observe.state_stream import StateFeed
from octavo_server.router.observe.workers import WorkerGroup, Workers
from octavo_server.router.prompts.prompt_hashers import PromptHashers
from octavo_server.router.prompts.prompt_source import PromptSource
from octavo_server.router.proxy.handler import ProxyHandler
from octavo_server.router.proxy.request import KINDS, OTHERS
from octavo_server.router.proxy.retries import RetryBudget
from octavo_server.router.settings import RouterSettings
from octavo_server.router.upstream.pool import ConnectionPools
from octavo_server.supervise import cancel_tasks, supervised

if TYPE_CHECKING:
    from octavo_server.router.observe.spans import RouteTracer

WAKE_EVERY_S = 0.25
#: The longest silence of a running stream once its replica is known to be dead.
DEAD_STREAM_S = 5.0


def _call_soon(act: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(act)


class Router:
    """ASGI application that belongs to one event loop from `start` to `stop`."""

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        group: WorkerGroup | None = None,
        tracer: "RouteTracer | None" = None,
    ) -> None:
        self.group = group or WorkerGroup()
        self.settings = settings
        self._secret = OutgoingSecret(settings.router_secret, settings.router_secret_file)
        self.tenants = TenantsFile(settings.tenants_file)
        self.rate_limits = RateLimits()
        self.in_flight = InFlight()
        self.lifecycle = Lifecycle(self.in_flight, timeout_s=settings.drain_timeout)
        self.index = PrefixIndex(max_entries=settings.max_index_entries)
        self.telemetry = RouterTelemetry(tracer=tracer)
        self.picker = Picker(self.index, clock=time.monotonic, call_soon=_call_soon)
        self.pools = ConnectionPools(connect_timeout_s=settings.forward.connect_timeout)
        follow = FollowSettings(secret=self._secret, key=settings.replica_key or "")
        listed = None if settings.services_file is None else ListedServices(settings.services_file)
        self.fleet = Fleet(follow, discovery, self.index, listed=listed)
        has_secret = settings.has_router_secret
        merges_tenants = not has_secret and (settings.needs_key or bool(settings.replica_key))
        self.hashers = PromptHashers(self.fleet, follow.headers, merges_tenants=merges_tenants)
        self.queue = RequestQueue(
            max_waiting=settings.forward.max_queued_reqs, observe=self.telemetry.metrics.record_wait
        )
        self.balancer = Balancer(
            fleet=self.fleet, picker=self.picker, pools=self.pools, queue=self.queue, limits=settings.forward
        )
        self._exact: set[Replica] = set()
        reporter = self._reporter()
        self.fleet.on_change += [self._on_replica_change, reporter.count_faults]
        self.fleet.on_load_update.append(self.picker.record_load)
        if self.tenants.is_given:
            self.fleet.on_load_update.append(self._record_tenants)
        self.workers = Workers(reporter, self.group.folder, self.group.number)
        self.feed = StateFeed(self.workers.state)
        self.workers.on_notify = self.feed.notify
        self.queue.on_change = self._on_queue_change
        self.lifecycle.on_change = self.feed.notify
        access = access_policy(
            settings, is_router=True, admin_port=settings.admin_port, admin_secrets=settings.admin_secret
        )
        self._proxy = self._make_proxy(access)
        self._rest = self._admin(access)
        self._paths = frozenset(KINDS) | OTHERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.settings.root_path:
            scope = _without_prefix(scope, self.settings.root_path)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            await self._proxy(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def start(self) -> None:
        await self.workers.start()
        await self.hashers.start()
        await self.fleet.start()
        self._tasks = [
            supervised("checking connections for silence", self.pools.run),
            supervised("waking the queue", self._tick),
        ]

    async def stop(self) -> None:
        await cancel_tasks(self._tasks)
        await self.fleet.stop()
        await self.hashers.stop()
        await self.workers.stop()
        self.pools.close()

    def _make_proxy(self, access: AccessPolicy) -> ProxyHandler:
        return ProxyHandler(
            settings=self.settings,
            fleet=self.fleet,
            prompts=PromptSource(self.hashers, self.settings.limits, RequestThreads()),
            balancer=self.balancer,
            telemetry=self.telemetry,
            lifecycle=self.lifecycle,
            in_flight=self.in_flight,
            access=access,
            cors=self.settings.cors,
            secret=self._secret,
            tenants=self.tenants,
            rate_limits=self.rate_limits,
            retry_budget=RetryBudget(),
            budget=BodyBudget(self.settings.max_body_memory),
        )

    def _reporter(self) -> Reporter:
        return Reporter(
            telemetry=self.telemetry,
            index=self.index,
            replicas=lambda: self.fleet.replicas,
            waiting=self.balancer.waiting,
            breaker=self.balancer.breaker_state,
            clock=time.monotonic,
            accepts=lambda: self.lifecycle.state == "accepting",
            models=self.fleet.models,
        )

    def _admin(self, access: AccessPolicy) -> ASGIApp:
        self.app = app = build_admin(AdminContext(workers=self.workers, feed=self.feed))
        app.state.service = routes.ServiceContext(
            fleet=self.fleet,
            lifecycle=self.lifecycle,
            balancer=self.balancer,
            max_hold_s=self.settings.forward.max_hold_time,
            group=self.group,
            created=int(time.time()),
        )
        app.include_router(routes.router)
        app.add_exception_handler(HTTPException, _answer_error)
        layered = self.settings.cors.wrap_app(AccessMiddleware(app, access))
        return RequestIdMiddleware(layered)

    def _on_replica_change(self, replica: Replica) -> None:
        if replica.is_unresponsive:
            self.pools.pool(replica.url).fail_waiting(begun_limit_s=DEAD_STREAM_S)
        was_exact = replica in self._exact
        (self._exact.add if replica.is_exact else self._exact.discard)(replica)
        if replica.is_exact and not was_exact:
            self.balancer.forget(replica.name)
        if replica.state == "gone":
            self.pools.retire(replica.url)
            self.balancer.forget(replica.name)
        self.queue.wake()
        self.feed.notify()

    def _record_tenants(self, replica: Replica) -> None:
        if replica.is_exact and replica.hello is not None and replica.hello.tenant_window_s:
            self.rate_limits.record_report(replica.name, replica.hello.epoch, replica.tenants)

    def _on_queue_change(self, model: str) -> None:
        """Report at once that the first request for a model is held, which starts a replica, or that the last one left.

        Queues before full replicas change too often for this.
        """
        if not self.fleet.routable(model):
            self.feed.notify()
            self.workers.notify_others()

    async def _tick(self) -> None:
        """Poll for changes that no call reports: a breaker gets half-open, another worker starts or ends a drain."""
        while True:
            await asyncio.sleep(WAKE_EVERY_S)
            self.queue.wake()
            self._drain_with_others()

    def _drain_with_others(self) -> None:
        drains = self.group.is_draining
        if drains and self.lifecycle.state == "accepting":
            self.lifecycle.drain()
        elif drains is False and self.lifecycle.state == "draining":
            self.lifecycle.resume()


def _without_prefix(scope: Scope, prefix: str) -> Scope:
    """Remove the prefix from the path if the path has it: some proxies remove it themselves."""
    raw = prefix.encode()
    if not scope["path"].startswith(f"{prefix}/") or not scope["raw_path"].startswith(raw + b"/"):
        return scope
    return {**scope, "path": scope["path"].removeprefix(prefix), "raw_path": scope["raw_path"].removeprefix(raw)}


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_reply(error, path=request.scope["path"])


class RouterServer(DrainingServer):
    """During the shutdown delay new requests are served: no proxy in front of a router would send them elsewhere."""

    accepts_during_delay = True

    def __init__(self, router: Router) -> None:
        self._feed = router.feed
        super().__init__(
            router,
            router.settings,
            router.lifecycle,
            on_refused_head=lambda _: router.telemetry.metrics.record_end(
                model="", code=431, reason="refused", duration_s=0.0
            ),
            interface="asgi3",
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close("the router is shutting down")
        await super().shutdown(sockets)
