"""`Balancer` leases replicas to requests. It owns the queue, the circuit breakers, outlier ejection and the picker.

`acquire` is the only way to a replica: it queues the request while no replica is free, chooses a replica, counts the
request as in flight there, and releases the replica when the `async with` block ends.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import ModelNotFound

from octavo_server.openai.errors import MalformedRequest, ReplicaLost, ReplicaTimeout
from octavo_server.router.balance.breaker import Breakers, BreakerState
from octavo_server.router.balance.outliers import OutlierDetector
from octavo_server.router.fleet.model_names import Ambiguous, Known, Pending
from octavo_server.router.observe.report import Waiting
from octavo_server.router.upstream.connection import StaleConnection

if TYPE_CHECKING:
    from octavo_server.router.balance.lease import Lease, Outcome
    from octavo_server.router.balance.picker import Picker
    from octavo_server.router.balance.queue import RequestQueue
    from octavo_server.router.fleet.fleet import Fleet
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.settings import ForwardLimits
    from octavo_server.router.upstream.pool import ConnectionPools

#: Pause before a retry when no other replica is left: meanwhile the KV stream reports whether the replica has stopped.
ROUND_PAUSE_S = 0.05
#: Status codes of a proxy, or of a replica that is starting or stopping. Not 500: the request itself may be the cause.
UNAVAILABLE = frozenset({502, 503, 504})


class Balancer:
    def __init__(
        self,
        *,
        fleet: "Fleet",
        picker: "Picker",
        pools: "ConnectionPools",
        queue: "RequestQueue",
        limits: "ForwardLimits",
    ) -> None:
        self.queue = queue
        self.breakers = Breakers(
            max_failures=limits.breaker_failures, open_s=limits.breaker_open_time, clock=time.monotonic
        )
        self.outliers = OutlierDetector(time.monotonic)
        self._fleet = fleet
        self._picker = picker
        self._pools = pools
        self._max_requests = limits.max_requests_per_replica

    @asynccontextmanager
    async def acquire(
        self,
        model: str,
        prompt: "Prompt",
        *,
        tenant: str = "",
        weight: float = 1.0,
        exclude: "Collection[Replica]" = (),
        hold_s: float,
    ) -> "AsyncIterator[Lease]":
        """Lease a replica for one attempt of a request. `exclude`: replicas to avoid while others exist. `weight`: the
        tenant's weight.

        Raises Overloaded if the queue or the tenant's share of it is full, and Unavailable if no replica was free for
        `hold_s`.
        """
        candidates = () if self.queue.has_waiting(model) and not exclude else self._candidates(model, exclude)
        waited_s = 0.0
        if not candidates:
            if exclude:
                await asyncio.sleep(ROUND_PAUSE_S)
            cost = (prompt.num_tokens + 2 * prompt.expected_output_tokens) / weight
            waited_s, candidates = await self._wait_candidates(model, tenant, cost, hold_s)
        lease = self._choose(prompt, candidates)
        lease.waited_s = waited_s
        outcome: Outcome | None = None
        try:
            yield lease
        except StaleConnection:
            outcome = "unknown"
            raise
        except (ReplicaLost, ReplicaTimeout):
            outcome = "failed"
            raise
        finally:
            self._release(model, lease, outcome)

    def is_resolved(self, model: str | None) -> bool:
        """True if `resolve` can decide, False while a replica that may serve the model hasn't reported its models."""
        return bool(model and self._fleet.routable(model)) or not isinstance(self._fleet.resolve(model), Pending)

    async def wait_resolved(self, model: str | None, *, tenant: str = "", hold_s: float) -> None:
        """Wait until `is_resolved` is true. Raises Overloaded if the queue is full, and Unavailable after `hold_s`."""
        why = "the replicas have not reported their models yet"
        has_room = partial(self.is_resolved, model)
        await self.queue.wait(model or "", has_room, tenant=tenant, hold_s=hold_s, why=why)

    def resolve(self, model: str | None) -> str:
        """Return the name of the served model for a request that asks for `model`.

        Raises ModelNotFound for an unknown name, and MalformedRequest if it is missing and there are several models.
        """
        if model and self._fleet.routable(model):
            return model
        match self._fleet.resolve(model):
            case Known(name):
                return name
            case Ambiguous(names):
                raise MalformedRequest(
                    f"`model` is missing, or the body is not valid JSON: name one of {', '.join(names)}.", param="model"
                )
        raise ModelNotFound(model or "")

    def has_other(self, model: str, exclude: "Collection[Replica]") -> bool:
        return bool(self._candidates(model, exclude))

    def record_first_byte(self, lease: "Lease") -> None:
        assert lease.response is not None
        status, name = lease.response.status, lease.replica.name
        lease.record_first_byte(is_error=status >= 400)
        if status < 500 and self.breakers:
            self.breakers.record_success(name)
        if status < 400:
            self.outliers.record_success(name)

    def record_refusal(self, model: str, replica: "Replica") -> None:
        """Record that the replica refused, with 401, 403 or 404, a request that another replica accepted."""
        self.outliers.record_error(replica.name, self._peers(model))

    def breaker_state(self, name: str) -> BreakerState:
        """State of a replica's circuit breaker for the state stream. It counts as open while the replica is ejected."""
        return "open" if self.outliers.is_ejected(name) else self.breakers.state(name)

    def waiting(self) -> Waiting:
        """Count the waiting requests by model, those for an adapter with its base model while that has a replica."""
        counts = self.queue.num_by_model()
        held = {model: count for model, count in counts.items() if not self._fleet.routable(model)}
        queued = Counter[str]()
        for model, count in counts.items():
            queued[self._fleet.base_model(model)] += 0 if model in held else count
        return Waiting(dict(+queued), held)

    def forget(self, name: str) -> None:
        self.breakers.record_success(name)
        self.outliers.forget(name)

    def _candidates(self, model: str, exclude: "Collection[Replica]") -> "Sequence[Replica]":
        """Replicas that may get the request now: never full replicas, and ejected replicas only if all are ejected.

        A retry (`exclude` isn't empty) gets a replica with an open breaker if there is no other, as it doesn't wait.
        """
        replicas = self._fleet.routable(model)
        if self._max_requests is not None:
            replicas = [replica for replica in replicas if replica.num_in_flight < self._max_requests]
        if exclude:
            replicas = [replica for replica in replicas if replica not in exclude]
        if self.breakers:
            closed = [replica for replica in replicas if self.breakers.allows(replica.name)]
            replicas = closed or (replicas if exclude else closed)
        if self.outliers:
            replicas = [replica for replica in replicas if not self.outliers.is_ejected(replica.name)] or replicas
        return replicas

    async def _wait_candidates(
        self, model: str, tenant: str, cost: float, hold_s: float
    ) -> "tuple[float, Sequence[Replica]]":
        waited_s = 0.0
        has_room = partial(self.has_other, model, ())
        while True:
            waited_s += await self.queue.wait(
                model,
                has_room,
                tenant=tenant,
                cost=cost,
                hold_s=max(hold_s - waited_s, 0.0),
                why=self._why_none(model),
                wake_s=partial(self._wake_s, model),
            )
            if candidates := self._candidates(model, ()):
                return waited_s, candidates

    def _choose(self, prompt: "Prompt", candidates: "Sequence[Replica]") -> "Lease":
        started_s = time.perf_counter()
        decision = self._picker.pick(prompt, candidates)
        decision_s = time.perf_counter() - started_s
        self.breakers.record_dispatch(decision.chosen.name)
        lease = self._picker.lease(decision, prompt, self._pools.pool(decision.chosen.url))
        lease.decision_s = decision_s
        return lease

    def _release(self, model: str, lease: "Lease", outcome: "Outcome | None") -> None:
        response, name = lease.response, lease.replica.name
        status = 0 if response is None else response.status
        if response is not None:
            response.close()
        if outcome is None:
            is_ok = response is not None and response.is_complete and status < 400
            outcome = "failed" if status >= 500 else "ok" if is_ok else "unknown"
        lease.release(outcome)
        if outcome == "failed":
            self.outliers.record_error(name, self._peers(model))
        if outcome == "failed" and (not status or status < 500 or status in UNAVAILABLE):
            self.breakers.record_failure(name)
        elif self.breakers:
            self.breakers.release_probe(name)
        if self.queue:
            asyncio.get_running_loop().call_soon(self.queue.wake)

    def _peers(self, model: str) -> list[str]:
        return [replica.name for replica in self._fleet.routable(model)]

    def _wake_s(self, model: str) -> float | None:
        """Length of the last wake of the model's service; None if it has a replica or no wake was measured."""
        service = None if self._fleet.routable(model) else self._fleet.listed_service(model)
        return None if service is None else service.wake_s

    def _why_none(self, model: str) -> str:
        replicas, limit = self._fleet.routable(model), self._max_requests
        if not replicas:
            service = self._fleet.listed_service(model)
            if service is not None and service.sleeps:
                return f"the model `{model}` was scaled to zero, and its first replica still starts"
            return f"no replica of the model `{model}` takes requests now"
        why = f"all replicas of the model `{model}` are busy or failing"
        if limit is None:
            return why
        num_full = sum(replica.num_in_flight >= limit for replica in replicas)
        return f"{why}; full replicas: {num_full} of {len(replicas)}, limit: {limit} (--max-requests-per-replica)"
