"""`Fleet`: all replicas that discovery lists, each followed by a task of its own, and the routable replicas by model.

The other parts of the router get replicas from the fleet only. A task sweeps index entries of replicas that are gone or
whose stream broke, a few in each turn of the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from octavo_server.router.fleet.endpoint import Discovery, Endpoint
from octavo_server.router.fleet.kv_stream_client import ClientContext, FollowSettings, KVStreamClient
from octavo_server.router.fleet.listed_services import ListedServices, Service
from octavo_server.router.fleet.model_names import Resolution, known_models, resolve_model
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.supervise import cancel_tasks, supervised

SWEPT_AT_ONCE = 4096
READ_BUFFER_BYTES = 64 * 1024
#: Once a replica is routable, the router is ready after this time, or earlier when more than half of them are routable.
FEW_S = 2.0
#: Time for which requests wait after a model's last replica left discovery, because a rollout may start another one.
DEPARTED_S = 60.0

Listener = Callable[[Replica], None]


class Fleet:
    """Belongs to one event loop. Listeners in `on_change` get each replica whose state, models or readiness changed,
    those in `on_load_update` the replica of each KV frame, after its load is set. `clock`: replaced in tests only.
    """

    def __init__(
        self,
        settings: FollowSettings,
        discovery: Discovery,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
        listed: ListedServices | None = None,
    ) -> None:
        self.index = index
        self.on_change: list[Listener] = []
        self.on_load_update: list[Listener] = []
        self._settings = settings
        self._discovery = discovery
        self._followed: dict[Endpoint, Replica] = {}  # key: the endpoint without its readiness
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._routable: dict[str, list[Replica]] = {}
        self._departed: dict[str, float] = {}  # model -> time when a replica that reported it left discovery
        self._clock = clock
        self._listed = listed
        self._is_discovered = False
        self._routable_since_s: float | None = None  # start of the time with at least one routable replica
        self._can_sweep = asyncio.Event()
        index.on_slot_released = self._can_sweep.set

    @property
    def replicas(self) -> list[Replica]:
        return [*self._followed.values()]

    def models(self) -> list[str]:
        """Names of the listed models and adapters, and of those that replicas reported, routable or not, so that a
        replica's restart removes no model."""
        return known_models(self._followed.values(), self._services())

    def resolve(self, model: str | None) -> Resolution:
        """Resolve the model name of a request. After a `Pending` result, call this again at each `on_change` and at the
        time `again_at_s` of the result.
        """
        now_s = self._clock()
        self._departed = {name: left_s for name, left_s in self._departed.items() if now_s - left_s < DEPARTED_S}
        return resolve_model(
            model, self._followed.values(), departed=self._departed, listed=self._services(), now_s=now_s
        )

    def _services(self) -> Sequence[Service] | None:
        return None if self._listed is None else self._listed.services

    def listed_service(self, model: str) -> Service | None:
        """The listed service of a model or adapter; None if the list has none, or if the router has no list."""
        return next((service for service in self._services() or () if service.serves(model)), None)

    def routable(self, model: str) -> list[Replica]:
        """Replicas that may get requests for `model`. The caller must not change the list."""
        replicas = self._routable.get(model)
        if replicas is None:
            replicas = [r for r in self._followed.values() if r.serves(model) and r.is_routable]
            replicas = [r for r in replicas if not r.is_silent] or replicas
            if replicas:
                self._routable[model] = replicas
        return replicas

    def base_model(self, name: str) -> str:
        """Return the base model of an adapter, which its requests use; any other name is returned as it is."""
        holder = next(iter(self.routable(name)), None)
        return name if holder is None or name not in holder.adapters else min(holder.models)

    @property
    def unready_reason(self) -> str | None:
        """Reason why this router isn't ready; None if it is.

        It is ready when more than half of the expected replicas are routable, or one has been for `FEW_S`: a starting
        router would otherwise send all its requests to the first replica. Pods that aren't ready are not expected: they
        become ready because this router follows them. A router without any expected replica is ready, and holds
        requests until a replica is routable.
        """
        if not self._is_discovered:
            return "discovery has not listed the replicas yet"
        expected = [replica for replica in self._followed.values() if replica.endpoint.is_ready is not False]
        num_routable = sum(replica.is_routable for replica in expected)
        if 2 * num_routable > len(expected) or not expected:
            return None
        if not num_routable:
            refusals = [f"; {replica.name}: {replica.refusal}" for replica in expected if replica.refusal]
            return f"none of {len(expected)} replicas accepts requests" + "".join(refusals[:1])
        if self._routable_since_s is not None and self._clock() - self._routable_since_s >= FEW_S:
            return None
        return f"{num_routable} of {len(expected)} replicas accept requests: waiting for more than half, or {FEW_S:g} s"

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, use_dns_cache=False)  # addresses may change
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES)
        self._context = ClientContext(
            session=self._session,
            index=self.index,
            settings=self._settings,
            on_change=self.notify_change,
            on_load_update=self._load_updated,
        )
        self._own = [
            supervised("the discovery of replicas", self._discover),
            supervised("the sweep of the prefix index", self._sweep),
        ]

    async def stop(self) -> None:
        await cancel_tasks([*self._own, *self._tasks.values()])
        await self._session.close()

    async def _discover(self) -> None:
        async for endpoints in self._discovery.watch():
            self._update_endpoints(endpoints)

    def _update_endpoints(self, endpoints: frozenset[Endpoint]) -> None:
        self._is_discovered = True
        now = {Endpoint(e.url, e.name): e for e in endpoints}
        for known in self._followed.keys() - now.keys():
            left = self._followed.pop(known)
            self._departed |= dict.fromkeys((*left.models, *left.adapters), self._clock())
            self._tasks.pop(known).cancel()
        for known, endpoint in now.items():
            replica = self._followed.get(known)
            if replica is None:
                replica = self._followed[known] = Replica(endpoint)
                replica.away_since_s = self._clock()
                self._tasks[known] = self._follow(replica)
            elif replica.endpoint != endpoint:
                replica.endpoint = endpoint
                self.notify_change(replica)

    def _follow(self, replica: Replica) -> "asyncio.Task[None]":
        return supervised(f"following replica {replica.name}", lambda: KVStreamClient(replica, self._context).run())

    def notify_change(self, replica: Replica) -> None:
        self._routable.clear()
        if replica.state != "connecting":
            replica.away_since_s = None
        elif replica.away_since_s is None:
            replica.away_since_s = self._clock()
        if not any(other.is_routable for other in self._followed.values()):
            self._routable_since_s = None
        elif self._routable_since_s is None:
            self._routable_since_s = self._clock()
        for listener in self.on_change:
            listener(replica)

    def _load_updated(self, replica: Replica) -> None:
        for listener in self.on_load_update:
            listener(replica)

    async def _sweep(self) -> None:
        while True:
            await self._can_sweep.wait()
            self._can_sweep.clear()
            while self.index.sweep(SWEPT_AT_ONCE):
                await asyncio.sleep(0)
