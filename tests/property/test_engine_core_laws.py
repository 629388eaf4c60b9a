"""Laws of the engine core under random arrivals, aborts and failing steps, in any order.

Grammars become ready, or fail, at any time, too. Each (request, index) ends in exactly one terminal record, no record
follows it, a client's tokens are a prefix of the script, and afterwards every block is free or cached.
"""

from collections import defaultdict
from concurrent.futures import Future

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.grammar.compiler import GrammarError
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids


class EngineCoreLaws(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[str]] = {}
        self.got: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], str] = {}

    @initialize(
        num_blocks=st.integers(8, 20), host=st.sampled_from([0, 6]), budget=st.sampled_from([5, 16, 64]), data=st.data()
    )
    def start(self, num_blocks, host, budget, data):
        ahead = data.draw(st.sampled_from([0, 1, 2]))
        mode = data.draw(st.sampled_from(["auto", "swap", "recompute"]))
        config = SchedulerConfig(
            max_model_len=100, num_blocks=num_blocks, num_host_blocks=host, block_size=4, max_num_seqs=6,
            max_num_batched_tokens=budget, preemption_mode=mode, steps_ahead=ahead, debug_invariants=True,
        )  # fmt: skip
        self.executor = ScriptedExecutor()
        self.core = EngineCore(Scheduler(config), self.executor)

    @rule(
        length=st.integers(1, 40),
        replies=st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=3),
        fail_at=st.none() | st.integers(0, 12),
        grammar=st.none() | st.sampled_from(["g", "h", "i"]),
    )
    def add(self, length, replies, fail_at, grammar):
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = replies
        params = scripted(*replies, n=len(replies), extra_args={"fail_at": fail_at})
        prompt = text_ids("x" * length)
        if grammar is not None:
            self.executor.preparing.setdefault(grammar, Future())
        self.core.add(
            EngineRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, eos_token_id=EOS, grammar=grammar
            )
        )

    @precondition(lambda self: any(not future.done() for future in self.executor.preparing.values()))
    @rule(data=st.data(), compiles=st.booleans())
    def prepare(self, data, compiles):
        waiting = sorted(name for name, future in self.executor.preparing.items() if not future.done())
        self._prepare(data.draw(st.sampled_from(waiting)), compiles=compiles)

    def _prepare(self, grammar, *, compiles):
        future = self.executor.preparing[grammar]
        if compiles:
            future.set_result(grammar)
        else:
            future.set_exception(GrammarError("scripted"))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), index=st.none() | st.integers(0, 2))
    def abort(self, data, index):
        self.core.abort(data.draw(st.sampled_from(sorted(self.asked))), index)

    @rule()
    def step(self):
        for out in self.core.step().outputs:
            key = (out.request_id, out.index)
            assert key not in self.ended, f"{key} goes on after its end"
            self.got[key] += out.token_ids
            if out.finish_reason is not None:
                self.ended[key] = out.finish_reason

    @invariant()
    def what_came_is_a_prefix_of_the_script(self):
        for (request_id, index), tokens in self.got.items():
            script = text_ids(self.asked[request_id][index], eos=True)
            assert tokens == script[: len(tokens)]
            if self.ended.get((request_id, index)) == "stop":
                assert tokens == script

    def teardown(self):
        for grammar, future in getattr(self, "executor", ScriptedExecutor()).preparing.items():
            if not future.done():
                self._prepare(grammar, compiles=True)
        for _ in range(2000):
            if not getattr(self, "core", None) or not self.core.has_work():
                break
            self.step()
        else:
            raise AssertionError("no end in 2000 steps")
        assert set(self.ended) == {(r, i) for r, replies in self.asked.items() for i in range(len(replies))}
        if self.asked:
            stats = self.core.stats()
            assert (stats.running, stats.waiting, stats.in_use_blocks) == (0, 0, 0)
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


TestEngineCoreLaws = EngineCoreLaws.TestCase
