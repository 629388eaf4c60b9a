"""`World`: requests, routers and replicas in one queue of events, in virtual time.

A request is routed when it arrives and reaches its replica `ROUTE_S` later; a full replica refuses it with 429. The
router receives responses `REPLY_S` and frames `FRAME_S` after the replica has sent them. Each request ends once,
finished or refused. A drained replica gets no new requests; when its last one has ended, every router drops its cache.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from octavo_server.kv.frames import Step
from octavo_server.router.fleet.block_mirror import BlockMirror
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica

from router_sim.engine import SimEngine
from router_sim.hardware import Hardware
from router_sim.oracle import Oracle, hashes_of
from router_sim.router_view import Policy, PolicyRequest, RouterView
from router_sim.workloads import Request

ROUTE_S, REPLY_S, FRAME_S = 0.001, 0.001, 0.002
MAX_ENTRIES = 4_000_000


@dataclass(slots=True)
class Outcome:
    """Result of a request. Times are the router's; `oracle_tokens` is the upper bound of its cached tokens."""

    replica: int
    arrived_s: float
    prompt_tokens: int
    oracle_tokens: int
    expected_tokens: int | None = None
    cached_tokens: int = 0
    first_byte_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    is_refused: bool = False


@dataclass(slots=True)
class _LoadMeter:
    """Requests in flight of a replica, integrated over time."""

    now: int = 0
    since_s: float = 0.0
    total_s: float = 0.0

    def change(self, by: int, now: float) -> None:
        self.total_s += self.now * (now - self.since_s)
        self.now += by
        self.since_s = now


class World:
    """Independent routers get the requests in turn. `on_end` is called when a request has ended."""

    def __init__(
        self,
        hardware: Hardware,
        num_replicas: int,
        make_policy: Callable[[RouterView], Policy],
        *,
        seed: int = 0,
        routers: int = 1,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.now = 0.0
        self.outcomes: dict[int, Outcome] = {}
        self.engines = [SimEngine(hardware, epoch=i) for i in range(num_replicas)]
        self.loads = [_LoadMeter() for _ in self.engines]
        self.views = [self._make_view(hardware, Random(f"{seed} {router}")) for router in range(routers)]
        self.policies = [make_policy(view) for view in self.views]
        self._on_end = on_end
        self._oracle = Oracle()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._policy_requests: dict[int, PolicyRequest] = {}
        self._answering: dict[int, Request] = {}
        self._followers: dict[int, Request] = {}
        self._draining: set[int] = set()  # replicas that still have requests

    def drain_at(self, at_s: float, choose: Callable[["World"], int]) -> None:
        """Drain the replica that `choose` returns at `at_s`; the policy must be `Octavo`. Call it before `run`."""
        self._schedule(at_s, lambda: self._drain(choose(self)))

    def run(self, requests: list[Request]) -> None:
        """Run until every request has ended."""
        self._followers = {request.after: request for request in requests if request.after is not None}
        for request in requests:
            if request.after is None:
                self._schedule(request.at_s, partial(self._arrive, request))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        assert len(self.outcomes) == len(requests)

    def _make_view(self, hardware: Hardware, rng: Random) -> RouterView:
        index = PrefixIndex(max_entries=MAX_ENTRIES)
        return RouterView(
            clock=lambda: self.now,
            rng=rng,
            hardware=hardware,
            index=index,
            replicas=[_replica(i, engine, index) for i, engine in enumerate(self.engines)],
            engines=self.engines,
        )

    def _drain(self, replica: int) -> None:
        self._draining.add(replica)
        for view in self.views:
            observed = view.replicas[replica]
            observed.endpoint = replace(observed.endpoint, is_ready=False)
        self._remove_if_drained(replica)

    def _remove_if_drained(self, replica: int) -> None:
        if replica in self._draining and not self.loads[replica].now:
            self._draining.remove(replica)
            self._schedule(self.now + FRAME_S, partial(self._remove, replica))  # after its last frame

    def _remove(self, replica: int) -> None:
        for view in self.views:
            removed = view.replicas[replica]
            assert removed.blocks is not None
            removed.blocks.release()
            removed.state = "gone"

    def _policy_of(self, number: int) -> Policy:
        """Return the policy of the router that this request is sent to."""
        return self.policies[number % len(self.policies)]

    def _schedule(self, at_s: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, happen))

    def _arrive(self, request: Request) -> None:
        asked, policy = policy_request(request), self._policy_of(request.number)
        replica = policy.pick(asked)
        self._policy_requests[request.number] = asked
        self.outcomes[request.number] = Outcome(
            replica=replica,
            arrived_s=self.now,
            prompt_tokens=asked.num_tokens,
            oracle_tokens=self._oracle.count_findable(asked),
            expected_tokens=policy.expected_tokens(asked.number),
        )
        self.loads[replica].change(1, self.now)
        self._schedule(self.now + ROUTE_S, partial(self._reach, request, replica))

    def _reach(self, request: Request, replica: int) -> None:
        engine = self.engines[replica]
        if engine.is_full:
            self.outcomes[request.number].is_refused = True
            self._schedule(self.now + REPLY_S, partial(self._end, request, replica))
            return
        self._answering[request.number] = request
        self._send_frame(replica, engine.add(request, self.now))
        if engine.is_idle:
            self._step(replica)

    def _step(self, replica: int) -> None:
        engine = self.engines[replica]
        if engine.begin(self.now):
            self._schedule(engine.ends_s, partial(self._finish_step, replica))
            self._send_frame(replica, engine.started_frame())

    def _finish_step(self, replica: int) -> None:
        outputs, frame = self.engines[replica].finish()
        for output in outputs:
            number = int(output.request_id)
            outcome = self.outcomes[number]
            outcome.output_tokens += len(output.token_ids)
            if outcome.first_byte_s is None:
                outcome.first_byte_s = self.now + REPLY_S
                outcome.cached_tokens = output.num_cached_tokens
                self._schedule(self.now + REPLY_S, partial(self._deliver_first_byte, number, replica))
            if output.finish_reason is not None:
                request = self._answering.pop(number)
                self._schedule(self.now + REPLY_S, partial(self._end, request, replica))
        self._send_frame(replica, frame)
        self._step(replica)

    def _send_frame(self, replica: int, frame: Step | None) -> None:
        if frame is not None:
            self._schedule(self.now + FRAME_S, partial(self._receive_frame, replica, frame))

    def _deliver_first_byte(self, number: int, replica: int) -> None:
        self._policy_of(number).on_first_byte(
            self._policy_requests[number], replica, self.outcomes[number].cached_tokens
        )

    def _end(self, request: Request, replica: int) -> None:
        outcome, asked = self.outcomes[request.number], self._policy_requests.pop(request.number)
        assert outcome.ended_s is None, "a request that ended twice"
        outcome.ended_s = self.now
        self.loads[replica].change(-1, self.now)
        self._remove_if_drained(replica)
        self._policy_of(request.number).on_end(asked, replica, ok=not outcome.is_refused)
        if not outcome.is_refused:
            self._oracle.add_answer(request)
        if (follower := self._followers.pop(request.number, None)) is not None:
            at_s = follower.at_s if outcome.is_refused else max(follower.at_s, self.now + follower.pause_s)
            self._schedule(max(at_s, self.now), partial(self._arrive, follower))
        self._on_end()

    def _receive_frame(self, replica: int, frame: Step) -> None:
        for view, policy in zip(self.views, self.policies, strict=True):
            observed = view.replicas[replica]
            assert observed.blocks is not None
            observed.blocks.feed(frame)
            observed.load = frame.load
            policy.on_frame(replica)

    def check(self) -> None:
        """Assert the laws that hold at the end of a run."""
        assert not self._policy_requests
        assert not self._answering
        assert not self._followers
        assert all(outcome.ended_s is not None for outcome in self.outcomes.values())
        replicas_used = Counter(outcome.replica for outcome in self.outcomes.values())
        assert replicas_used.total() == len(self.outcomes)
        for engine in self.engines:
            stats = engine.scheduler.stats()
            assert engine.num_requests == stats.in_use_blocks == stats.running == stats.waiting == 0
            engine.scheduler.check()


def policy_request(request: Request) -> PolicyRequest:
    hashes = hashes_of(request.prompt)
    return PolicyRequest(number=request.number, text=request.prompt, hashes=hashes, max_tokens=len(request.answer))


def _replica(number: int, engine: SimEngine, index: PrefixIndex) -> Replica:
    replica = Replica(Endpoint(url=f"http://r{number}", name=f"r{number}", is_ready=True))
    replica.blocks = BlockMirror(index)
    for frame in engine.hello():
        replica.blocks.feed(frame)
    replica.load = replica.blocks.load
    replica.state, replica.models = "exact", frozenset({"sim"})
    return replica
