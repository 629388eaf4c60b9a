"""Names of adapters: changes of one name are made in order, those of different names do not wait for each other."""

import asyncio
import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING

import octavo_engine.settings.lora
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.frontend.adapter_names import AdapterNames
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.loaded_adapters import AdapterSource
from octavo_engine.process import messages
from octavo_engine.process.client import CoreProcess
from octavo_engine.process.main import call_adapter
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.lora import lora_modules
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.sources.progress import STALL_S
from octavo_engine.wire.errors import InvalidRequest, ModelNotFound, OctavoError, Unavailable
from octavo_testing.clock import Clock
from octavo_testing.scripted import ScriptedExecutor, ready_info, scripted_adapter, scripted_hash

if TYPE_CHECKING:
    from octavo_engine.runner.executor import ReadAdapter

MAX_NAMES = 4  # of two tests


class Sources(ScriptedExecutor):
    """Every source waits for `finish_reading`."""

    def prepare_adapter(self, location: str, advance: Callable[[int], None]) -> "Future[ReadAdapter]":
        self.preparing[location] = Future()
        return super().prepare_adapter(location, advance)


class LinkedCore(CoreProcess):
    """The client of a core in this process. Messages wait in both directions until a test delivers them."""

    def __init__(self, config: EngineConfig) -> None:
        self._calls, self._call_ids = {}, itertools.count()
        self.executor, self.clock = Sources(), Clock()
        start = [
            (scripted_hash(module.path), AdapterSource(module.path, module.path)) for module in config.lora_modules
        ]
        self.executor.adapters = list(dict(start))
        limits = SchedulerConfig(max_model_len=64, num_blocks=64, block_size=4)
        self.core = EngineCore(Scheduler(limits), self.executor, adapters=start, clock=self.clock)
        self.inbox: deque[messages.AdapterCall] = deque()
        self.outbox: deque[messages.Answered | messages.CallFailed] = deque()

    def send(self, message: messages.ToCore) -> None:
        assert isinstance(message, messages.AdapterCall)
        self.inbox.append(message)

    def deliver_to_core(self) -> None:
        if self.inbox:
            call_adapter(self.core, self.inbox.popleft(), self.outbox.append)
        self.core.step()

    def deliver_answer(self) -> None:
        if self.outbox:
            match self.outbox.popleft():
                case messages.Answered(call_id, answer):
                    self._resolve_call(call_id, answer)
                case messages.CallFailed(call_id, text, is_invalid):
                    self._resolve_call(
                        call_id, InvalidRequest(text) if is_invalid else Unavailable(text, retry_after_s=1)
                    )

    def finish_reading(self, location: str) -> None:
        reading = self.executor.preparing.pop(location, None)
        if reading is not None:
            reading.set_result(scripted_adapter(location.partition("#")[0]))

    @property
    def num_loaded(self) -> Counter[str]:
        adapters = self.core._adapters
        return Counter({name: len(each) for name, each in adapters._sources.items() if name in adapters})


class Rig:
    def __init__(self) -> None:
        config = EngineConfig(model="m", enable_lora=True, lora_modules=lora_modules("n0=/x0"))
        ready = ready_info(config)
        self.core = LinkedCore(config)
        self.names = AdapterNames(self.core, config, ready)
        self.numbers = itertools.count()

    def load(self, name: str, content: str, *, in_place: bool = True) -> "asyncio.Task[None]":
        """Start a load of a location that is read when `finish_reading` is called for its path, `last_path`."""
        self.last_path = f"{content}#{next(self.numbers)}"
        return _task(self.names.load(name, self.last_path, in_place=in_place, on_change=None))

    def unload(self, name: str) -> "asyncio.Task[None]":
        return _task(self.names.unload(name, on_change=None))

    async def deliver(self, *, reads: bool = False) -> None:
        """Deliver messages until nothing moves. `reads`: sources give all their bytes."""
        num_idle = 0
        while num_idle < 8:  # iterations of the event loop in which nothing has moved
            is_idle = not (self.core.inbox or self.core.outbox or (reads and self.core.executor.preparing))
            num_idle = num_idle + 1 if is_idle else 0
            if reads:
                for path in list(self.core.executor.preparing):
                    self.core.finish_reading(path)
            self.core.deliver_to_core()
            self.core.deliver_answer()
            await asyncio.sleep(0)

    def hashes(self) -> dict[str, str]:
        return {name: adapter.hash for name, adapter in self.names.by_name.items()}


def _task(call: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    return asyncio.create_task(call)


def error_of(task: "asyncio.Task[None]") -> str:
    return type(task.exception()).__name__ if task.exception() is not None else ""


@pytest.mark.asyncio
async def test_a_stalled_load_delays_no_other_name() -> None:
    rig = Rig()
    stalled = rig.load("a", "/a")
    await rig.deliver()
    others = [rig.load("b", "/b")]
    await rig.deliver()
    rig.core.finish_reading(rig.last_path)
    await rig.deliver()
    others += [rig.unload("n0"), rig.load("c", "/c", in_place=False)]
    await rig.deliver()
    rig.core.finish_reading(rig.last_path)
    await rig.deliver()
    assert [error_of(each) for each in others] == ["", "", ""]
    assert not stalled.done()
    rig.core.clock.now_s += STALL_S
    await rig.deliver()
    assert isinstance(stalled.exception(), Unavailable)
    assert rig.hashes() == {"b": scripted_hash("b"), "c": scripted_hash("c")}


@pytest.mark.asyncio
async def test_changes_of_one_name_are_made_in_order_and_locks_are_freed() -> None:
    rig = Rig()
    first, second = rig.load("a", "/a", in_place=False), rig.load("a", "/b", in_place=False)
    unloaded, third = rig.unload("a"), rig.load("a", "/c", in_place=False)
    await rig.deliver()
    assert len(rig.core.executor.preparing) == 1
    await rig.deliver(reads=True)
    assert [error_of(each) for each in (first, second, unloaded, third)] == ["", "AdapterNameTaken", "", ""]
    assert rig.hashes() == {"n0": scripted_hash("x0"), "a": scripted_hash("c")}
    gc.collect()
    assert not rig.names._locks


@pytest.mark.asyncio
async def test_an_unload_waits_for_the_load_of_its_name_and_a_client_that_leaves_frees_the_name() -> None:
    rig = Rig()
    loading, unloading = rig.load("a", "/a"), rig.unload("a")
    await rig.deliver()
    assert not unloading.done()
    loading.cancel()
    await rig.deliver()
    assert isinstance(unloading.exception(), ModelNotFound)
    again = rig.load("a", "/b")
    await rig.deliver(reads=True)
    assert error_of(again) == ""
    assert rig.hashes()["a"] == scripted_hash("b")
    assert rig.core.executor.adapters == [scripted_hash("x0"), scripted_hash("b")]


@pytest.mark.asyncio
async def test_an_adapter_that_is_loaded_just_when_its_client_leaves_is_unloaded() -> None:
    rig = Rig()
    loading = rig.load("a", "/a")
    await asyncio.sleep(0)
    rig.core.deliver_to_core()
    rig.core.finish_reading(rig.last_path)
    rig.core.deliver_to_core()
    assert rig.core.num_loaded[scripted_hash("a")] == 1
    loading.cancel()
    await rig.deliver()
    assert rig.core.num_loaded == {scripted_hash("x0"): 1}
    assert rig.core.executor.adapters == [scripted_hash("x0")]
    assert not rig.core._calls


@pytest.mark.asyncio
async def test_names_that_are_being_loaded_count_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_engine.settings.lora, "MAX_NAMES", MAX_NAMES)
    rig = Rig()
    tasks = [rig.load(f"a{index}", f"/a{index}") for index in range(MAX_NAMES)]
    await rig.deliver(reads=True)
    assert [error_of(each) for each in tasks] == [""] * (MAX_NAMES - 1) + ["InvalidRequest"]
    assert f"{MAX_NAMES + 1} adapters exceed the limit of {MAX_NAMES}: " in str(tasks[-1].exception())
    assert len(rig.names.by_name) == MAX_NAMES


@pytest.mark.asyncio
async def test_a_name_of_the_limit_may_be_replaced_and_a_longer_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(octavo_engine.settings.lora, "MAX_NAMES", MAX_NAMES)
    rig = Rig()
    tasks = [rig.load(f"a{index}", f"/a{index}") for index in range(MAX_NAMES - 1)]
    await rig.deliver(reads=True)
    replaced, long = rig.load("a0", "/b"), rig.load("n" * 129, "/b")
    await rig.deliver(reads=True)
    assert [error_of(each) for each in (*tasks, replaced)] == [""] * MAX_NAMES
    assert rig.hashes()["a0"] == scripted_hash("b")
    assert "129 bytes; the limit is 128" in str(long.exception())


NAMES, CONTENTS = st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(["/x0", "/x1", "/x2"])
STEPS = st.one_of(
    st.tuples(st.just("load"), NAMES, CONTENTS, st.booleans()),
    st.tuples(st.just("unload"), NAMES),
    st.tuples(st.sampled_from(["read", "cancel"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["to_core", "answer", "run", "stall"])),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_any_interleaving_ends_with_what_the_last_successful_call_of_each_name_says(steps: list[tuple]) -> None:
    asyncio.run(_interleave(steps))


async def _interleave(steps: list[tuple]) -> None:
    rig = Rig()
    ended: list[tuple[str, str | None]] = [("n0", scripted_hash("x0"))]  # (name, hash) of successful calls, in order
    tasks: list[asyncio.Task[None]] = []

    for step in steps:
        match step:
            case ("load", name, content, in_place):
                tasks.append(asyncio.create_task(_load(rig, ended, name, content, in_place=in_place)))
            case ("unload", name):
                tasks.append(asyncio.create_task(_unload(rig, ended, name)))
            case ("read", index):
                paths = list(rig.core.executor.preparing)
                if paths:
                    rig.core.finish_reading(paths[index % len(paths)])
            case ("cancel", index):
                if tasks:
                    tasks[index % len(tasks)].cancel()
            case ("to_core",):
                rig.core.deliver_to_core()
            case ("answer",):
                rig.core.deliver_answer()
            case ("stall",):
                rig.core.clock.now_s += STALL_S
            case ("run",):
                await asyncio.sleep(0)
    await rig.deliver(reads=True)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, OctavoError | asyncio.CancelledError) for result in results)
    await rig.deliver(reads=True)
    assert rig.hashes() == {name: content for name, content in dict(ended).items() if content is not None}
    assert rig.core.num_loaded == Counter(rig.hashes().values())
    assert set(rig.core.executor.adapters) == set(rig.hashes().values())
    assert not rig.core._calls
    assert not rig.core.core._adapters._loads


async def _load(rig: Rig, ended: list[tuple[str, str | None]], name: str, content: str, *, in_place: bool) -> None:
    path = f"{content}#{next(rig.numbers)}"
    new = scripted_hash(content)
    await rig.names.load(name, path, in_place=in_place, on_change=lambda _: ended.append((name, new)))


async def _unload(rig: Rig, ended: list[tuple[str, str | None]], name: str) -> None:
    await rig.names.unload(name, on_change=lambda _: ended.append((name, None)))
