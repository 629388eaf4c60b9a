"""`BlockPool` against a model: dictionaries of reference counts and contents, and one list in order of use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_engine.core.blocks import BlockPool

hashes = st.sampled_from([bytes([i]) * 32 for i in range(4)])


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(size, evicted=lambda block, block_hash: self.evicted.append((block, block_hash)))
        self.refs = dict.fromkeys(range(size), 0)
        self.content: dict[int, bytes] = {}
        self.unused = list(range(size))  # next to be evicted first

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count > len(self.unused):
            return
        expected, self.unused = self.unused[:count], self.unused[count:]
        lost = [(block, self.content.pop(block)) for block in expected if block in self.content]
        self.evicted.clear()
        assert self.pool.allocate(count) == expected
        assert self.evicted == lost
        self.refs.update(dict.fromkeys(expected, 1))

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), count=st.integers(1, 3))
    def release(self, data: st.DataObject, count: int) -> None:
        held = [block for block, n in self.refs.items() if n]
        blocks = data.draw(st.lists(st.sampled_from(held), max_size=count, unique=True))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.unused.insert(len(self.unused) if block in self.content else 0, block)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        can = [block for block, n in self.refs.items() if n or block in self.content]
        if can:
            block = data.draw(st.sampled_from(can))
            self.pool.share([block])
            if not self.refs[block]:
                self.unused.remove(block)
            self.refs[block] += 1

    @rule(data=st.data(), block_hash=hashes)
    def register(self, data: st.DataObject, block_hash: bytes) -> None:
        can = [block for block, n in self.refs.items() if n and block not in self.content]
        if can:
            block = data.draw(st.sampled_from(can))
            self.pool.register(block, block_hash)
            self.content[block] = block_hash

    @rule(block_hash=hashes)
    def find(self, block_hash: bytes) -> None:
        found = self.pool.find(block_hash)
        assert (found is None) == (block_hash not in self.content.values())
        assert found is None or self.content[found] == block_hash

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.refs == [*self.refs.values()]
            assert self.pool.num_cached == sum(block in self.content for block in self.unused)
            assert self.pool.num_in_use == sum(n > 0 for n in self.refs.values())


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=40)
