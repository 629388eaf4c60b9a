import pytest
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.router.balance import score
from octavo_server.router.balance.lease import MIN_PREDICTED_S, POLLED_S
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_testing.clock import Clock
from octavo_testing.router_replicas import FedReplica, blind_replica, prompt_of


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def index():
    return PrefixIndex(max_entries=10_000)


@pytest.fixture
def picker(index, clock):
    return Picker(index, clock=clock)


def load(**fields):
    return ReplicaLoad(free_blocks=1000, total_blocks=1000, **fields)


def test_the_replica_with_the_longest_prefix_is_chosen(index, picker):
    fed = [FedReplica(index, name, device=range(1, 1 + n)) for name, n in [("a", 3), ("b", 20), ("c", 10)]]
    replicas = [f.replica for f in fed]
    decision = picker.pick(prompt_of(range(1, 31)), replicas)
    assert decision.chosen is replicas[1]
    assert (decision.rung, decision.why, decision.expected_tokens) == ("exact", "least cost", 320)
    assert [t.match for t in decision.candidates] == [Match(3), Match(20), Match(10)]
    assert picker.pick(prompt_of(range(1, 31)), replicas, exclude=[replicas[1]]).chosen is replicas[2]


def test_a_long_queue_outweighs_a_prefix(index, picker):
    warm, cold = FedReplica(index, "warm", device=range(1, 31)), FedReplica(index, "cold")
    replicas = [warm.replica, cold.replica]
    warm.publish_step(load(prefill_backlog_tokens=300))
    assert picker.pick(prompt_of(range(1, 31)), replicas).chosen is warm.replica
    warm.publish_step(load(prefill_backlog_tokens=600))
    assert picker.pick(prompt_of(range(1, 31)), replicas).chosen is cold.replica


def test_a_prefix_is_worth_more_where_others_would_be_delayed(index, picker):
    warm, cold = FedReplica(index, "warm", device=range(1, 31)), FedReplica(index, "cold")
    replicas = [warm.replica, cold.replica]
    warm.publish_step(load(prefill_backlog_tokens=600, running=8))
    assert picker.pick(prompt_of(range(1, 31)), replicas).chosen is cold.replica
    cold.publish_step(load(running=8))
    assert picker.pick(prompt_of(range(1, 31)), replicas).chosen is warm.replica
    warm.publish_step(load(prefill_backlog_tokens=9000, running=8))
    assert picker.pick(prompt_of(range(1, 31)), replicas).chosen is cold.replica


def test_a_tie_goes_to_the_replica_with_the_fewest_requests(index, picker):
    fed = [FedReplica(index, name) for name in "ab"]
    for replica, running in zip(fed, (2, 1), strict=True):
        replica.publish_step(load(running=running, prefill_backlog_tokens=5000))
    decision = picker.pick(prompt_of(range(1, 11)), [f.replica for f in fed])
    assert (decision.chosen, decision.why) == (fed[1].replica, "tie: least load")


@pytest.mark.parametrize("other", [0, 20])
def test_a_tie_goes_to_the_longest_match(index, picker, other):
    """Waiting in a queue may cost as much as computing elsewhere, but computing delays the next requests."""
    warm, cold = FedReplica(index, "warm", device=range(1, 31)), FedReplica(index, "cold", device=range(1, 1 + other))
    warm.publish_step(load(prefill_backlog_tokens=16 * (30 - other), waiting=1))
    decision = picker.pick(prompt_of(range(1, 31), extra_tokens=200), [warm.replica, cold.replica])
    costs = [terms.cost_s for terms in decision.candidates]
    assert max(costs) <= min(costs) * 1.05
    assert decision.chosen is warm.replica


def test_a_tie_of_similar_matches_goes_to_the_fewest_requests(index, picker):
    busy, idle = FedReplica(index, "busy", device=range(1, 31)), FedReplica(index, "idle", device=range(1, 30))
    busy.publish_step(load(waiting=1, prefill_backlog_tokens=1))
    prompt = prompt_of(range(1, 31), extra_tokens=600)
    assert picker.pick(prompt, [busy.replica, idle.replica]).chosen is idle.replica


def report_load(picker, fed, **fields):
    fed.publish_step(load(**fields))
    picker.record_load(fed.replica)


def test_a_sent_request_counts_until_the_second_reported_load(index, picker):
    fed = FedReplica(index, "a")
    prompt = prompt_of(range(1, 11))
    report_load(picker, fed)
    lease = picker.lease(picker.pick(prompt, [fed.replica]), prompt)
    activity = fed.replica.local_load
    assert (activity.pending_tokens, activity.num_in_flight) == (165, 1)
    for _ in range(5):  # heartbeats or evictions: the engine hasn't received the request yet
        report_load(picker, fed)
    report_load(picker, fed, running=1)
    assert activity.pending_tokens == 165
    report_load(picker, fed, running=2)
    assert activity.pending_tokens == 0
    lease.release("ok")
    assert (activity.pending_tokens, activity.num_pending, activity.num_in_flight) == (0, 0, 0)


def test_the_reported_number_of_received_requests_ends_pending(index, picker):
    """A request counts beside a load that doesn't include it, however different, and not beside one that does."""
    fed = FedReplica(index, "a")
    report_load(picker, fed, received=7)
    activity = fed.replica.local_load
    leases = []
    for number in range(3):
        prompt = prompt_of([100 + number], extra_tokens=number)
        leases.append(picker.lease(picker.pick(prompt, [fed.replica]), prompt))
    for running in range(4):  # steps of other requests end
        report_load(picker, fed, received=7, running=running)
    assert (activity.num_pending, activity.pending_tokens) == (3, 16 + 17 + 18)
    report_load(picker, fed, received=8, running=1)
    assert (activity.num_pending, activity.pending_tokens) == (2, 17 + 18)
    leases[0].release("ok")
    leases[2].record_first_byte()  # the response arrives before the load, on another connection
    assert (activity.num_pending, activity.pending_tokens) == (1, 17)
    report_load(picker, fed, received=1, running=1)  # the replica was restarted
    assert (activity.num_pending, activity.pending_tokens) == (0, 0)


@pytest.mark.parametrize(("waiting", "found", "queued"), [(0, 0, 5000), (2, 960, 4040), (3, 4999, 3)])
def test_waiting_requests_count_without_their_cached_tokens(index, picker, waiting, found, queued):
    """This holds for requests of all routers; each computes at least its last token."""
    fed = FedReplica(index, "a")
    report_load(picker, fed, waiting=waiting, prefill_backlog_tokens=5000, waiting_cached_tokens=found)
    assert score.queued_tokens(fed.replica) == queued


@pytest.mark.parametrize("frames", [0, 1, 2, 3])
@pytest.mark.parametrize("begins", [True, False])
def test_the_first_byte_or_the_end_ends_pending_once(index, picker, frames, begins):
    fed = FedReplica(index, "a")
    prompt = prompt_of(range(1, 11))
    lease = picker.lease(picker.pick(prompt, [fed.replica]), prompt)
    for running in range(frames):
        report_load(picker, fed, running=running)
    if begins:
        lease.record_first_byte()
        lease.record_first_byte()
    lease.release("unknown")
    lease.release("ok")
    activity = fed.replica.local_load
    assert (activity.pending_tokens, activity.num_pending) == (0, 0)
    assert (activity.num_in_flight, activity.num_unanswered) == (0, 0)


def test_siblings_follow_a_prediction_until_it_expires(index, picker, clock):
    replicas = [FedReplica(index, name).replica for name in "abcd"]
    prompt = prompt_of(range(1, 31))
    first = picker.pick(prompt, replicas)
    assert (first.rung, first.why) == ("exact", "tie: least load")
    picker.lease(first, prompt).record_first_byte()
    second = picker.pick(prompt_of([*range(1, 31), 99]), replicas)
    assert second.chosen is first.chosen
    assert (second.rung, second.expected_tokens) == ("predicted", 480)
    clock.now_s += MIN_PREDICTED_S
    assert picker.pick(prompt, replicas).chosen is not first.chosen  # it got one request


def test_a_failed_request_removes_only_its_own_prediction(index, picker):
    fed = FedReplica(index, "a")
    prompt = prompt_of([1, 2, 3])
    leases = [picker.lease(picker.pick(prompt, [fed.replica]), prompt) for _ in range(2)]
    leases[0].release("unknown")
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 48
    leases[1].release("unknown")
    assert picker.pick(prompt, [fed.replica]).expected_tokens == 0


def test_a_frame_confirms_a_prediction(index, picker, clock):
    fed = FedReplica(index, "a")
    prompt = prompt_of([1, 2, 3])
    picker.lease(picker.pick(prompt, [fed.replica]), prompt)
    fed.publish_step(stored=[1, 2])
    clock.now_s += MIN_PREDICTED_S
    decision = picker.pick(prompt, [fed.replica])
    assert decision.candidates[0].match == Match(2)
    assert decision.rung == "exact"


def test_a_reused_slot_has_no_predictions_of_a_broken_stream(index, picker, clock):
    fed = FedReplica(index, "a")
    prompt = prompt_of([1, 2, 3])
    picker.lease(picker.pick(prompt, [fed.replica]), prompt)
    slot = fed.blocks.slot
    fed.lose()
    while index.sweep(100):
        pass
    other = FedReplica(index, "b")
    assert other.blocks.slot == slot
    picker.lease(picker.pick(prompt, [other.replica]), prompt)
    clock.now_s += MIN_PREDICTED_S / 2
    again = picker.lease(picker.pick(prompt, [other.replica]), prompt)
    clock.now_s += MIN_PREDICTED_S / 2
    assert picker.pick(prompt, [other.replica]).expected_tokens == 48
    again.release("unknown")
    assert picker.pick(prompt, [other.replica]).expected_tokens == 0


def test_a_blind_replica_is_predicted_to_hold_sent_prompts(index, picker, clock):
    replicas = [blind_replica(name) for name in "abcd"]
    prompt = prompt_of(range(1, 31))
    first = picker.pick(prompt, replicas)
    assert first.rung == "hash"
    picker.lease(first, prompt).release("ok")
    clock.now_s += POLLED_S - 1
    second = picker.pick(prompt, replicas)
    assert (second.chosen, second.rung) == (first.chosen, "predicted")
    clock.now_s += 1
    assert picker.pick(prompt, replicas).rung == "hash"


def test_an_unhashed_prompt_is_routed_by_its_beginning_within_bounds(index, picker):
    replicas = [FedReplica(index, name).replica for name in "abcd"]
    prompt = prompt_of([], extra_tokens=500, affinity=17)
    decisions = [picker.pick(prompt, replicas)]
    for _ in range(12):
        picker.lease(decisions[-1], prompt)
        decisions.append(picker.pick(prompt, replicas))
    assert {d.rung for d in decisions} == {"hash"}
    assert decisions[1].chosen is decisions[0].chosen
    counts = sorted(r.num_in_flight for r in replicas)
    assert sum(counts) == 12
    assert counts[-1] - 1 <= 1.25 * 11 / 4 + 1  # when it got the last request


def test_without_any_knowledge_the_least_load_is_chosen(index, picker):
    replicas = [blind_replica(name) for name in "abc"]
    prompt = prompt_of([], affinity=0)
    for _ in range(6):
        decision = picker.pick(prompt, replicas)
        assert decision.rung == "load"
        picker.lease(decision, prompt)
    assert [r.num_in_flight for r in replicas] == [2, 2, 2]


def test_the_reported_load_of_a_blind_replica_counts(index, picker):
    busy, idle = blind_replica("a"), blind_replica("b")
    busy.load = load(running=3, waiting=1)
    prompt = prompt_of([], affinity=0)
    for _ in range(4):
        decision = picker.pick(prompt, [busy, idle])
        assert decision.chosen is idle
        picker.lease(decision, prompt)
    assert picker.pick(prompt, [busy, idle]).chosen is busy


def test_worth_is_the_tokens_that_only_this_replica_could_save(index, picker, clock):
    a, b = FedReplica(index, "a", device=range(1, 31)), FedReplica(index, "b", device=range(1, 11))
    prompt = prompt_of(range(1, 31))
    picker.lease(picker.pick(prompt, [a.replica, b.replica]), prompt)
    assert a.replica.local_load.worth_tokens.at(clock.now_s) == 20 * 16
    assert b.replica.local_load.worth_tokens.at(clock.now_s) == 0
    assert a.replica.local_load.worth_tokens.at(clock.now_s + 600) == pytest.approx(160)


def test_a_blind_replica_counts_as_fast_as_a_streaming_one(index, picker):
    fed, blind = FedReplica(index, "a"), blind_replica("b")
    for tokens in [1, 500] * 20:
        fed.publish_step(load(step_tokens=tokens, step_ms=tokens * 1.0))
        picker.record_load(fed.replica)
    streaming, unknown = picker.pick(prompt_of(range(1, 11)), [fed.replica, blind]).candidates
    assert streaming.prefill_s == pytest.approx(165 * 0.001, rel=0.05)
    assert unknown.prefill_s == pytest.approx(streaming.prefill_s, rel=0.01)


@pytest.mark.parametrize("step_ms", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_an_impossible_step_is_ignored(index, picker, step_ms):
    fed = FedReplica(index, "a")
    fed.publish_step(load(step_tokens=100, step_ms=step_ms))
    picker.record_load(fed.replica)
    assert fed.replica.local_load.rates.num_steps == 0


def test_cached_tokens_of_waiting_requests_are_no_queue(index, picker):
    warm, cold = FedReplica(index, "warm", device=range(1, 31)), FedReplica(index, "cold")
    prompt = prompt_of(range(1, 31))
    for _ in range(4):
        picker.lease(picker.pick(prompt, [warm.replica]), prompt)
    for waiting in (3, 4):
        report_load(
            picker, warm, waiting=waiting, prefill_backlog_tokens=waiting * 484, waiting_cached_tokens=waiting * 480
        )
    decision = picker.pick(prompt, [warm.replica, cold.replica])
    assert decision.chosen is warm.replica
    assert decision.chosen_cost.queue_s == pytest.approx(4 * 4 * warm.replica.local_load.rates.token_s)


def test_without_free_blocks_the_cost_includes_their_release(index, picker, clock):
    full, free = FedReplica(index, "full"), FedReplica(index, "free")
    prompt = prompt_of(range(1, 31), max_tokens=16)
    lease = picker.lease(picker.pick(prompt, [full.replica]), prompt)
    clock.now_s += 10
    lease.release("ok")
    full.publish_step(ReplicaLoad(running=4, free_blocks=0, cached_blocks=12, total_blocks=112))
    free.publish_step(load(running=4))
    decision = picker.pick(prompt, [full.replica, free.replica])
    assert decision.chosen is free.replica
    assert decision.candidates[0].evict_s == pytest.approx(20 / 100 * 10, rel=0.02)
    assert decision.candidates[1].evict_s == 0


def test_the_number_of_predicted_blocks_is_bounded(index, picker, clock, monkeypatch):
    monkeypatch.setattr("octavo_server.router.balance.predictions.MAX_BLOCKS", 25)
    replica = blind_replica("a")
    for first in (100, 200, 300):
        prompt = prompt_of(range(first, first + 10))
        picker.lease(picker.pick(prompt, [replica]), prompt)
        clock.now_s += 1
    found = [picker.pick(prompt_of(range(first, first + 10)), [replica]).expected_tokens for first in (100, 200, 300)]
    assert found == [0, 160, 160]
