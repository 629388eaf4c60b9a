"""Laws of adapters in the engine core: random loads, unloads, rewritten folders, requests, stalls and sleeps.

A step has only adapters that are in memory, of the right content, and at most `max_loras` different ones; memory holds
at most `max_cpu_loras`. Requests for the model itself never wait for a read. A request ends with an error only if a
folder of its adapter was rewritten, stalled or gone. Afterwards, all requests have ended, and memory has no adapter
that no name has.
"""

from concurrent.futures import Future
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.loaded_adapters import AdapterSource
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.sources.progress import STALL_S
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.records import EngineRequest
from octavo_testing.clock import Clock
from octavo_testing.scripted import ScriptedAdapter, ScriptedExecutor, scripted

FOLDERS, CONTENTS = [f"/f{i}" for i in range(5)], ["c0", "c1", "c2", "c3"]
INDEX = st.integers(0, 7)


class FolderExecutor(ScriptedExecutor):
    """Reads folders when a test says so. `contents`: of folders; None if a folder is gone."""

    def __init__(self, max_loras: int, max_in_memory: int) -> None:
        super().__init__()
        self.max_loras, self.max_in_memory = max_loras, max_in_memory
        self.contents: dict[str, str | None] = dict(zip(FOLDERS, [*CONTENTS, "c0"], strict=True))
        self.reads: list[tuple[str, Future[ScriptedAdapter]]] = []
        self.adapter_of: dict[int, str] = {}

    def prepare_adapter(self, location, advance):
        future = Future()
        self.reads.append((location, future))
        return future

    def finish_read(self, index: int) -> None:
        folder, future = self.reads.pop(index % len(self.reads))
        content = self.contents[folder]
        if content is None:
            future.set_exception(StartupError(f"adapter {folder}: there is no such folder."))
        else:
            future.set_result(ScriptedAdapter(content, Path(folder)))

    def add_adapter(self, prepared):
        super().add_adapter(prepared)
        assert len(self.adapters) <= self.max_in_memory

    def release(self, tag):
        super().release(tag)
        if tag == "weights":
            self.adapters.clear()

    def submit(self, plan):
        self.adapter_of |= {new.seq_id: new.adapter for new in plan.new_seqs}
        adapters = {self.adapter_of[step.seq_id] for step in plan.seqs} - {""}
        assert len(adapters) <= self.max_loras
        assert adapters <= set(self.adapters)
        return super().submit(plan)


class AdapterLaws(RuleBasedStateMachine):
    @initialize(max_loras=st.integers(1, 3), max_in_memory=st.integers(1, 4), num_places=st.integers(1, 6))
    def start(self, max_loras, max_in_memory, num_places):
        self.clock, self.executor = Clock(), FolderExecutor(max_loras, max_in_memory)
        limits = SchedulerConfig(
            max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=num_places, max_loras=max_loras,
            debug_invariants=True,
        )  # fmt: skip
        contents = self.executor.contents
        start = [(contents[folder], AdapterSource(folder, folder)) for folder in FOLDERS]
        self.executor.adapters = CONTENTS[:max_in_memory]
        self.core = EngineCore(
            Scheduler(limits), self.executor, clock=self.clock, adapters=start, max_cpu_loras=max_in_memory
        )
        self.loaded = [(contents[folder], folder) for folder in FOLDERS]  # hashes and locations of living loads
        self.spoiled: set[str] = set()  # contents of which a folder was rewritten, stalled or gone
        self.adapters: dict[str, str] = {}  # of requests
        self.ended: dict[str, str] = {}
        self.num_loads = 0

    @rule(folder=st.sampled_from(FOLDERS))
    def load(self, folder):
        self.num_loads += 1

        def reply(result):
            if isinstance(result, str):
                self.loaded.append((result, folder))

        self.core.start_loading_adapter(self.num_loads, folder, reply)

    @rule(num_steps=st.integers(1, 3))
    def progress(self, num_steps):
        for _ in range(num_steps):
            if self.executor.reads:
                self.executor.finish_read(0)
            self.step()

    @precondition(lambda self: self.loaded)
    @rule(index=INDEX)
    def unload(self, index):
        self.core.unload_adapter(*self.loaded.pop(index % len(self.loaded)))

    @rule(folder=st.sampled_from(FOLDERS), content=st.sampled_from([*CONTENTS, None]))
    def rewrite(self, folder, content):
        self.spoiled |= {adapter for adapter, location in self.loaded if location == folder} | set(CONTENTS)
        self.executor.contents[folder] = content

    @precondition(lambda self: self.executor.reads)
    @rule(index=INDEX)
    def finish_read(self, index):
        self.executor.finish_read(index)

    @precondition(lambda self: self.executor.reads)
    @rule()
    def stall(self):
        self.clock.now_s += STALL_S
        self.spoiled |= set(CONTENTS)

    @rule(indices=st.lists(st.none() | INDEX, min_size=1, max_size=4), length=st.integers(1, 6))
    def add(self, indices, length):
        for index in indices:
            self._add(index, length)

    def _add(self, index, length):
        adapter = "" if index is None or not self.loaded else self.loaded[index % len(self.loaded)][0]
        request_id = f"r{len(self.adapters)}"
        self.adapters[request_id] = adapter
        params = scripted("abcdefgh", max_tokens=length, ignore_eos=True)
        self.core.add(EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, adapter=adapter))
        if self.core.is_sleeping:
            self.spoiled.add(adapter)
            self.step()
            self.spoiled.discard("")

    @precondition(lambda self: self.adapters)
    @rule(index=INDEX)
    def abort(self, index):
        ids = [*self.adapters]
        self.core.abort(ids[-1 - index % len(ids)])

    @rule()
    def step(self):
        for out in self.core.step().outputs:
            if out.finish_reason is None:
                continue
            assert out.request_id not in self.ended
            self.ended[out.request_id] = out.finish_reason
            if out.finish_reason == "error":
                assert out.error.kind == "unavailable"
                assert self.adapters[out.request_id] in self.spoiled

    @rule(tags=st.sampled_from([["kv_cache"], ["kv_cache", "weights"]]))
    def sleep(self, tags):
        self.core.call("sleep", tags)
        self.step()

    @rule()
    def wake_up(self):
        self.core.call("wake_up", ["weights", "kv_cache"])

    @invariant()
    def requests_for_the_model_wait_for_no_read(self):
        core = getattr(self, "core", None)
        for seq in core._scheduler.sequences() if core else ():
            assert seq.adapter or seq.status != "deferred"

    def teardown(self):
        if getattr(self, "core", None) is None:
            return
        self.wake_up()
        for _ in range(2000):
            self.step()
            if self.executor.reads:
                self.executor.finish_read(0)
            elif not self.core.has_work():
                break
        assert set(self.ended) == set(self.adapters)
        assert not self.core._adapters._loads
        assert set(self.executor.adapters) <= {adapter for adapter, _ in self.loaded}
        assert set(self.core._adapters._in_memory) == set(self.executor.adapters)


TestAdapterLaws = AdapterLaws.TestCase
