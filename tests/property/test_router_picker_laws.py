"""The picker under any order of requests, ends, frames, losses and passing time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_server.kv.frames import ReplicaLoad
from octavo_server.router.balance import score
from octavo_server.router.balance.lease import MIN_PREDICTED_S, POLLED_S
from octavo_server.router.balance.picker import NOTHING, Picker
from octavo_server.router.balance.score import TIE
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_testing.router_replicas import FedReplica, prompt_of

HASHES = range(1, 9)  # prompts share the first hashes and differ in the later ones
PREFIXES = st.integers(0, 5).map(lambda n: list(range(1, n + 1)))
PROMPTS = st.builds(lambda shared, own: [*shared, *own], PREFIXES, st.lists(st.integers(6, 8), max_size=2, unique=True))
LOADS = st.builds(
    ReplicaLoad,
    running=st.integers(0, 20),
    waiting=st.integers(0, 20),
    free_blocks=st.integers(0, 50),
    cached_blocks=st.integers(0, 50),
    total_blocks=st.just(100),
    prefill_backlog_tokens=st.integers(0, 20_000),
    waiting_cached_tokens=st.integers(0, 30_000),
    received=st.integers(0, 20),
    step_tokens=st.integers(0, 2048),
    step_ms=st.floats(0, 1e5),
)


class ReportedRequest:
    """A request that a replica reports: another router's, or the router's own."""

    def __init__(self, hashes, slot, ends_s):
        self.predicts, self.slot, self.ends_s = {*hashes}, slot, ends_s


class Sent:
    """`predicts`: hashes that may be predicted in the slot until the request fails or its time is over."""

    def __init__(self, lease, prompt, slot, ends_s):
        self.lease, self.slot, self.ends_s = lease, slot, ends_s
        self.predicts = set(prompt.hashes)
        self.has_begun = False


class PickerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.index = PrefixIndex(max_entries=1000)
        self.picker = Picker(self.index, clock=lambda: self.now)
        self.fed = []
        self.open = []
        self.predicting = []

    @initialize(count=st.integers(1, 4))
    def start(self, count):
        self.fed = [FedReplica(self.index, f"r{k}") for k in range(count)]

    @property
    def replicas(self):
        return [fed.replica for fed in self.fed]

    @rule(hashes=PROMPTS, data=st.data(), affinity=st.integers(0, 3))
    def send(self, hashes, data, affinity):
        prompt = prompt_of(hashes, affinity=affinity)
        exclude = data.draw(st.lists(st.sampled_from(self.replicas), max_size=len(self.fed) - 1, unique=True))
        decision = self.picker.pick(prompt, self.replicas, exclude)
        assert decision == self.picker.pick(prompt, self.replicas, exclude)
        assert [t.replica for t in decision.candidates] == [r for r in self.replicas if r not in exclude]
        chosen = decision.chosen_cost
        assert chosen.replica is decision.chosen
        assert min(chosen[2:]) >= 0
        if decision.why == "least cost" or decision.why.startswith("tie"):
            assert chosen.cost_s <= (1 + TIE) * min(t.cost_s for t in decision.candidates)
        assert 0 <= decision.expected_tokens < prompt.num_tokens
        lease = self.picker.lease(decision, prompt)
        lasts_s = max(2 * chosen.ttft_s, MIN_PREDICTED_S) if decision.chosen.is_exact else POLLED_S
        sent = Sent(lease, prompt, decision.chosen.local_load.predicted.slot, self.now + lasts_s)
        self.open.append(sent)
        self.predicting.append(sent)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 100))
    def first_byte(self, data, tokens):
        sent = data.draw(st.sampled_from(self.open))
        sent.lease.record_first_byte()
        sent.has_begun = True

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ok=st.booleans())
    def end(self, data, ok):
        sent = data.draw(st.sampled_from(self.open))
        self.open.remove(sent)
        sent.lease.release("ok" if ok else "unknown")
        sent.lease.release("unknown" if ok else "ok")
        if not ok and not sent.has_begun:
            self.predicting = [s for s in self.predicting if s is not sent]

    @rule(data=st.data(), load=LOADS, stored=PREFIXES, coming=st.lists(st.sampled_from(HASHES), unique=True))
    def report_step(self, data, load, stored, coming):
        fed = data.draw(st.sampled_from(self.fed))
        if fed.replica.is_exact:
            known = [h for h in HASHES if self._match(fed.blocks.slot, h).device]
            fed.publish_step(load, stored=[h for h in stored if h not in known], removed=known[-2:], coming=coming)
            self.picker.record_load(fed.replica)
            token_s = fed.replica.local_load.rates.likely_token_s(self.picker._step_times[fed.replica.models].token_s)
            lasts_s = max(2 * score.queued_tokens(fed.replica) * token_s, MIN_PREDICTED_S)
            self.predicting.append(ReportedRequest(coming, fed.blocks.slot, self.now + lasts_s))

    @rule(data=st.data())
    def lose_or_find(self, data):
        """A broken stream becomes a new copy in a new slot; any replica may get the old slot."""
        fed = data.draw(st.sampled_from(self.fed))
        if fed.replica.is_exact:
            self.predicting = [s for s in self.predicting if s.slot != fed.blocks.slot]
            fed.lose()
        else:
            predicted = fed.replica.local_load.predicted
            self.predicting = [s for s in self.predicting if predicted is None or s.slot != predicted.slot]
            fed.connect()

    @rule(count=st.integers(1, 50))
    def sweep(self, count):
        self.index.sweep(count)

    @rule(passes_s=st.floats(0, 200))
    def wait(self, passes_s):
        self.now += passes_s

    @invariant()
    def nothing_is_predicted_without_a_live_request(self):
        if not self.fed:
            return
        self.picker.pick(prompt_of([40]), self.replicas)  # expires old predictions
        self.predicting = [s for s in self.predicting if s.ends_s > self.now]
        for replica in self.replicas:
            predicted = replica.local_load.predicted
            if predicted is None or not predicted.is_valid:
                continue
            allowed = set().union(*(s.predicts for s in self.predicting if s.slot == predicted.slot))
            assert {h for h in HASHES if self._match(predicted.slot, h).predicted} <= allowed

    @invariant()
    def every_open_request_is_counted_once(self):
        for replica in self.replicas:
            activity, mine = replica.local_load, [s for s in self.open if s.lease.decision.chosen is replica]
            assert activity.num_in_flight == len(mine)
            assert activity.num_unanswered == sum(not s.has_begun for s in mine)
            assert 0 <= activity.num_pending <= activity.num_unanswered
            assert (activity.pending_tokens > 0) == (activity.num_pending > 0)
            assert score.queued_tokens(replica) >= activity.pending_tokens
            assert activity.rates.token_s > 0
            assert activity.rates.step_s >= 0

    def teardown(self):
        for sent in self.open:
            sent.lease.release("ok")
        for replica in self.replicas:
            activity = replica.local_load
            assert (activity.num_in_flight, activity.num_unanswered, activity.num_pending) == (0, 0, 0)
            assert activity.pending_tokens == 0

    def _match(self, slot, block_hash):
        return self.index.match([block_hash], [slot]).get(slot, NOTHING)


TestPicker = PickerMachine.TestCase
TestPicker.settings = settings(stateful_step_count=30)
