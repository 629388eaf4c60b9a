"""Limits of tenants over several processes and replicas, in virtual time: late reports, and restarts."""

import heapq
import itertools

import pytest
from octavo_engine.wire.records import TenantUsage
from octavo_server.http.rate_limits import RateLimits
from octavo_server.http.tenants_file import NO_LIMITS
from octavo_server.kv.frames import TenantLoad
from octavo_server.kv.publisher import TENANTS_EVERY_S, TenantWindow
from octavo_server.openai.errors import RateLimited
from octavo_testing.clock import Clock

pytestmark = pytest.mark.slow

PROMPT, OUTPUT = 100, 50


def limits_of(**fields):
    return NO_LIMITS.model_copy(update=fields)


class Service:
    """Routers over replicas that publish their work with a delay; requests take `took_s` and generate steadily."""

    def __init__(self, limits, *, num_routers=4, num_replicas=3, delay_s=0.003, took_s=0.1):
        self.clock = Clock(1000.0)
        self.limits, self.delay_s, self.took_s = limits, delay_s, took_s
        self.routers = [RateLimits(self.clock) for _ in range(num_routers)]
        self.replicas = {f"replica-{i}": self.start_replica() for i in range(num_replicas)}
        self.epochs = itertools.count(1)
        self.epoch = dict.fromkeys(self.replicas, 0)
        self.accepted, self.refused, self.running = [], [], 0
        self.num_running = []  # requests in progress, at each start
        self.events, self.order, self.turns = [], itertools.count(), itertools.cycle(self.replicas)
        self.publish()

    def start_replica(self):
        return TenantWindow(self.clock)

    def at(self, time_s, act, *args):
        heapq.heappush(self.events, (time_s, next(self.order), act, args))

    def run_until(self, time_s):
        while self.events and self.events[0][0] <= time_s:
            self.clock.now_s, _, act, args = heapq.heappop(self.events)
            act(*args)
        self.clock.now_s = time_s

    def publish(self):
        for name, window in self.replicas.items():
            window.expire()
            loads = {
                tenant: TenantLoad(**{f: getattr(load, f) for f in load.__struct_fields__})
                for tenant, load in window.loads.items()
            }
            self.at(self.clock() + self.delay_s, self.deliver, name, self.epoch[name], loads)
        self.at(self.clock() + TENANTS_EVERY_S, self.publish)

    def deliver(self, name, epoch, loads):
        for router in self.routers:
            router.record_report(name, epoch, loads)

    def restart_replica(self, name):
        self.replicas[name], self.epoch[name] = self.start_replica(), next(self.epochs)

    def send(self, tenant, router, done=lambda is_accepted, wait_s: None):
        """Send a request to a router; `done` is called at its end, or at once if it is refused."""
        try:
            request = self.routers[router].admit(tenant, self.limits.get(tenant, NO_LIMITS), PROMPT + OUTPUT)
        except RateLimited as error:
            self.refused.append((self.clock(), tenant))
            done(False, error.retry_after_s)
            return
        self.accepted.append((self.clock(), tenant))
        self.running += 1
        self.num_running.append(self.running)
        name = next(self.turns)
        window = self.replicas[name]
        request.record_sent(name)
        self.at(self.clock() + 0.001, window.add_request, tenant, PROMPT)
        for part in range(1, 6):
            usage = {tenant: TenantUsage(generation_tokens=OUTPUT // 5)}
            self.at(self.clock() + 0.001 + part / 5 * self.took_s, window.add_usage, usage)
        self.at(self.clock() + 0.002 + self.took_s, self.end, window, tenant, request, done)

    def end(self, window, tenant, request, done):
        self.running -= 1
        window.end_request(tenant)
        request.end()
        done(True, 0.0)

    def num_accepted(self, tenant, from_s=0.0, to_s=1e9):
        return sum(name == tenant and from_s <= at_s < to_s for at_s, name in self.accepted)

    def connect(self, tenant, router, every_s, offset_s=0.0):
        """Send a request every `every_s` on one connection, or when the one before ended."""

        def send():
            started_s = self.clock()
            self.send(tenant, router, lambda *_: self.at(max(started_s + every_s, self.clock()), send))

        self.at(self.clock() + offset_s, send)


LIMIT = 180
KINDS = {
    "requests": (limits_of(requests_per_minute=LIMIT), LIMIT),
    "tokens": (limits_of(tokens_per_minute=LIMIT * (PROMPT + OUTPUT)), LIMIT),
}


@pytest.mark.parametrize("num_connections", [1, 50])
@pytest.mark.parametrize("delay_s", [0.003, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_at_three_times_its_limit_gets_its_limit_and_others_lose_nothing(kind, delay_s, num_connections):
    limits, limit = KINDS[kind]
    service = Service({"mallory": limits, "alice": limits}, delay_s=delay_s)
    start_s = service.clock()
    every_s = 60 / (3 * limit) * num_connections
    for i in range(num_connections):
        service.connect("mallory", i % 4, every_s, offset_s=every_s * i / num_connections)
    service.connect("alice", 1, 60 / limit * 1.25)
    service.connect("bob", 2, 0.2)
    service.run_until(start_s + 120)
    assert service.num_accepted("mallory") == pytest.approx(2 * limit, rel=0.1)
    assert {tenant for _, tenant in service.refused} == {"mallory"}
    service.run_until(start_s + 600)
    assert service.num_accepted("mallory") == pytest.approx(10 * limit, rel=0.1)


@pytest.mark.parametrize("is_polled", [False, True], ids=["reported", "polled"])
@pytest.mark.parametrize("every_s", [0.01, 0.7])
def test_one_process_accepts_exactly_the_limit_in_a_minute(every_s, is_polled):
    """Reports that include some of its requests count none of them twice."""
    service = Service({"alice": limits_of(requests_per_minute=40)}, num_routers=1, took_s=0.05)
    if is_polled:
        service.deliver = lambda *_: None
    service.connect("alice", 0, every_s)
    service.run_until(1060.0)
    assert len(service.accepted) == 40
    service.run_until(1062.0)
    assert 40 < len(service.accepted) <= 80


@pytest.mark.parametrize("took_s", [0.001, 0.05, 0.099, 0.3, 2.0])
@pytest.mark.parametrize("num_clients", [1, 3])
def test_one_process_never_refuses_as_many_at_once_as_the_limit(took_s, num_clients):
    limits = limits_of(concurrent_requests=num_clients)
    service = Service({"alice": limits}, num_routers=1, took_s=took_s, delay_s=0.05)
    for i in range(num_clients):
        service.connect("alice", 0, 0.01, offset_s=i * 0.01)
    service.run_until(1100.0 if took_s > 0.01 else 1020.0)
    assert (service.refused, max(service.num_running)) == ([], num_clients)


@pytest.mark.parametrize("delay_s", [0.003, 0.1])
def test_requests_in_progress_keep_to_their_limit_within_a_second(delay_s):
    """200 clients on 4 processes send again 0.1 s after an answer or a refusal, all at the same time."""
    service = Service({"mallory": limits_of(concurrent_requests=8)}, delay_s=delay_s, took_s=0.3)
    samples = []

    def client(router):
        service.send("mallory", router, lambda *_: service.at(service.clock() + 0.1, client, router))

    def sample():
        samples.append(service.running)
        service.at(service.clock() + 0.01, sample)

    for i in range(200):
        service.at(1000.0 + i * 1e-6, client, i % 4)
    service.run_until(1000.9)
    assert max(service.num_running) == 4 * 8
    service.num_running.clear()
    sample()
    service.run_until(1010.0)
    assert sum(samples) / len(samples) == pytest.approx(8, rel=0.15)
    assert max(service.num_running) <= 2 * 8


def restart_router(service):
    service.routers[0] = RateLimits(service.clock)


def restart_replica(service):
    service.restart_replica("replica-0")


def remove_replica(service):
    del service.replicas["replica-0"]
    service.turns = itertools.cycle(service.replicas)


@pytest.mark.parametrize("change", [restart_router, restart_replica, remove_replica])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_mid_minute_gives_no_second_allowance(kind, change):
    service = Service({"mallory": KINDS[kind][0]}, num_routers=2)
    for i in range(10):
        service.connect("mallory", i % 2, 0.5)
    service.run_until(1030.0)
    assert service.num_accepted("mallory") == pytest.approx(LIMIT, rel=0.1)
    change(service)
    service.run_until(1030.2)  # a router gets requests once it follows the replicas
    service.run_until(1060.0)
    assert service.num_accepted("mallory") == pytest.approx(LIMIT, rel=0.1)
    service.run_until(1180.0)
    assert service.num_accepted("mallory") == pytest.approx(3 * LIMIT, rel=0.15)
