"""A request that waited too long is dropped, unless it has started."""

from octavo_engine.config import SchedulerConfig
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.engine import EngineCore
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import ScriptedExecutor, scripted

CONFIG = SchedulerConfig(max_model_len=64, num_blocks=16, block_size=4, max_num_seqs=2, debug_invariants=True)


def ended(outputs):
    return {(out.request_id, out.index): out.finish_reason for out in outputs if out.finish_reason}


def test_only_what_never_ran_is_dropped():
    core = EngineCore(Scheduler(CONFIG), ScriptedExecutor())
    for name, n in (("runs", 2), ("waits", 1)):
        params = scripted("abc", n=n, temperature=1)
        core.add(EngineRequest(request_id=name, prompt_token_ids=[1, 2], params=params))
    core.step()
    for name in ("runs", "waits", "unknown"):
        core.abort(name, only_waiting=True)
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert ended(outputs) == {("runs", 0): "length", ("runs", 1): "length", ("waits", 0): "abort"}


def test_every_output_of_a_dropped_request_ends():
    core = EngineCore(Scheduler(CONFIG), ScriptedExecutor())
    core.add(EngineRequest(request_id="runs", prompt_token_ids=[1], params=scripted("abc")))
    core.step()
    core.add(EngineRequest(request_id="waits", prompt_token_ids=[1], params=scripted("a", n=2, temperature=1)))
    core.abort("waits", only_waiting=True)
    assert ended(core.step().outputs) == {("waits", 0): "abort", ("waits", 1): "abort"}
