"""Hot prefixes at low load: the replica that holds one is the cheapest, so only replication spreads it."""

from collections import Counter

import pytest
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.router.balance.decision import CandidateCost, Decision
from octavo_server.router.balance.hot_prefix import EARNED, MAX_PREFIXES, MOST_TOKENS, WHY, HotPrefixReplicator
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_testing.router_replicas import FedReplica, prompt_of

HOT = range(1, 31)  # 480 tokens


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Fleet:
    """Each request ends, and its computed blocks are reported, before the next one arrives."""

    def __init__(self, *, replicas=4):
        self.clock = Clock()
        self.index = PrefixIndex(max_entries=100_000)
        self.picker = Picker(self.index, clock=self.clock)
        self.fed = {name: FedReplica(self.index, name) for name in "abcdefgh"[:replicas]}
        self.decisions = []

    def ask(self, hashes):
        prompt = prompt_of(hashes)
        decision = self.picker.pick(prompt, [fed.replica for fed in self.fed.values()])
        lease = self.picker.lease(decision, prompt)
        fed = self.fed[decision.chosen.name]
        fed.publish_step(stored=hashes[decision.chosen_cost.match.device :])
        lease.record_first_byte()
        lease.release("ok")
        self.clock.now += 0.5
        self.decisions.append(decision)
        return decision

    def share_of_the_busiest(self):
        counts = Counter(decision.chosen.name for decision in self.decisions)
        return max(counts.values()) * len(self.fed) / counts.total()


def test_a_hot_prefix_spreads_to_all_idle_replicas():
    fleet = Fleet()
    for number in range(100):
        fleet.ask([*HOT, 1000 + number])
    assert fleet.share_of_the_busiest() <= 1.3
    copies = [d for d in fleet.decisions if d.why == WHY]
    assert 0 < len(copies) < len(fleet.fed)
    found = sum(d.expected_tokens for d in fleet.decisions)
    assert found >= 0.95 * 99 * 480


def test_a_few_similar_requests_stay_on_one_replica():
    fleet = Fleet()
    for number in range(5):
        fleet.ask([*HOT, 1000 + number])
    assert len({d.chosen.name for d in fleet.decisions}) == 1


def test_the_cost_of_replication_is_bounded():
    """Prefixes that would cost more than the budget stay where they are, until their hits have earned enough."""
    fleet = Fleet(replicas=8)
    long = [*range(1, 2 + MOST_TOKENS // 16)]
    for number in range(30):
        fleet.ask([*long, 10_000 + number])
    assert {d.why for d in fleet.decisions[1:]} == {"least cost"}
    fleet = Fleet(replicas=8)
    for number in range(60):
        fleet.ask([*long[: len(long) // 2], 10_000 + number])
    copies = [d for d in fleet.decisions if d.why == WHY]
    lost = sum(16 * max(t.match.blocks for t in d.candidates) - d.expected_tokens for d in copies)
    found = sum(d.expected_tokens for d in fleet.decisions)
    assert 0 < lost <= MOST_TOKENS + EARNED * found


def test_a_conversation_stays_where_it_is():
    """No other request would use the copy, and one conversation doesn't overload a replica."""
    fleet = Fleet()
    said = [*HOT]
    for number in range(40):
        said.append(1000 + number)
        fleet.ask(said)
    assert len({d.chosen.name for d in fleet.decisions}) == 1


def test_prefixes_below_a_replicas_share_stay_on_it():
    """Two prefixes on one replica make it busier, but computing one again gains nothing."""
    fleet = Fleet()
    prefixes = [range(100 * n, 100 * n + 30) for n in range(1, 9)]
    for prefix in prefixes:
        fleet.fed["a"].publish_step(stored=prefix)
    for number in range(160):
        fleet.ask([*prefixes[number % 8], 5000 + number])
    assert {d.why for d in fleet.decisions} == {"least cost"}
    assert {d.expected_tokens for d in fleet.decisions} == {480}


def test_the_number_of_counted_prefixes_is_bounded():
    replicator, replica = HotPrefixReplicator(), FedReplica(PrefixIndex(max_entries=10), "a").replica
    terms = CandidateCost(replica, Match(1), 0.0, 0.0, 0.0, 0.0)
    for number in range(MAX_PREFIXES + 10):
        replicator.record_dispatch(
            Decision(replica, "exact", "least cost", (terms,), 16), prompt_of([number]), float(number)
        )
    assert replicator.num_prefixes == MAX_PREFIXES


@pytest.mark.parametrize("running", [0, 1])
def test_only_idle_replicas_take_part(running):
    fleet = Fleet(replicas=2)
    for fed in fleet.fed.values():
        fed.publish_step(ReplicaLoad(running=running, free_blocks=1000, total_blocks=1000))
    for number in range(20):
        fleet.ask([*HOT, 1000 + number])
    assert any(d.why == WHY for d in fleet.decisions) == (running == 0)
