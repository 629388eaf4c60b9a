"""The prefix index against plain sets, under any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_server.router.fleet.prefix_index import DEVICE, HOST, PREDICTED, Match, PrefixIndex

HASHES = st.integers(1, 12)
KINDS = st.sampled_from([DEVICE, HOST, PREDICTED])


class IndexMachine(RuleBasedStateMachine):
    """`model[slot][hash]` is the set of kinds in which the replica has the block."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(max_entries=1000)
        self.model = {}

    @initialize(max_entries=st.sampled_from([1000, 100_000]))
    def one_table_or_many(self, max_entries):
        self.index = PrefixIndex(max_entries=max_entries)

    @precondition(lambda self: len(self.model) < 5)
    @rule()
    def acquire_slot(self):
        slot = self.index.acquire_slot()
        assert slot not in self.model
        self.model[slot] = {}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def give_up(self, data):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[slot]
        self.index.release_slot(slot)

    @rule(count=st.integers(1, 20))
    def sweep(self, count):
        self.index.sweep(count)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), hashes=st.lists(HASHES, max_size=6), kind=KINDS)
    def store(self, data, hashes, kind):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.index.store(slot, hashes, kind)
        for block_hash in hashes:
            kinds = self.model[slot].setdefault(block_hash, set())
            if kind != PREDICTED:
                kinds.discard(PREDICTED)
            if kind != PREDICTED or DEVICE not in kinds:
                kinds.add(kind)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), hashes=st.lists(HASHES, max_size=6), kind=KINDS)
    def remove(self, data, hashes, kind):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.index.remove(slot, hashes, kind)
        for block_hash in hashes:
            self.model[slot].get(block_hash, set()).discard(kind)

    @rule(prompt=st.lists(HASHES, max_size=8, unique=True), data=st.data())
    def match(self, prompt, data):
        slots = data.draw(st.sets(st.sampled_from(sorted(self.model)))) if self.model else set()
        assert self.index.match(prompt, slots) == {
            slot: match for slot in slots if (match := self.expected(prompt, slot)).blocks
        }

    def expected(self, prompt, slot):
        blocks = host = predicted = 0
        for block_hash in prompt:
            kinds = self.model[slot].get(block_hash)
            if not kinds:
                break
            blocks += 1
            if DEVICE not in kinds:
                host += HOST in kinds
                predicted += HOST not in kinds
        return Match(blocks, host, predicted)

    @invariant()
    def when_swept_nothing_is_left_of_the_gone(self):
        if self.index.sweep(0) == 0:
            known = {h for blocks in self.model.values() for h, kinds in blocks.items() if kinds}
            assert len(self.index) == len(known)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(stateful_step_count=40)
