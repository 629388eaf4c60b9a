from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.records import EngineRequest
from octavo_testing.clock import Clock
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids


def test_each_sequence_is_described_in_order_of_service():
    clock = Clock()
    config = SchedulerConfig(max_model_len=128, num_blocks=32, max_num_seqs=2, policy="priority")
    core = EngineCore(Scheduler(config), ScriptedExecutor(), clock=clock)
    for name, prompt, n, priority in (("late", "p" * 20, 2, 5), ("soon", "q" * 40, 1, -1)):
        params = scripted("a long answer", n=n)
        core.add(
            EngineRequest(
                request_id=name, prompt_token_ids=text_ids(prompt), params=params, eos_token_id=EOS, priority=priority
            )
        )
    clock.now_s = 2.0
    core.step()
    core.step()
    clock.now_s = 3.0
    expected = {
        "request_id": "soon",
        "indices": [0],
        "state": "running",
        "waiting_reason": None,
        "prompt_tokens": 40,
        "generated_tokens": 2,
        "computed_tokens": 41,
        "cached_tokens": 0,
        "blocks": 3,
        "preemptions": 0,
        "priority": -1,
        "age_s": 3.0,
        "queued_s": 2.0,
    }
    waiting = {
        **expected,
        "request_id": "late",
        "indices": [0, 1],
        "state": "waiting",
        "waiting_reason": "max_num_seqs",
        "prompt_tokens": 20,
        "generated_tokens": 0,
        "computed_tokens": 0,
        "blocks": 0,
        "priority": 5,
        "queued_s": 3.0,
    }
    assert core.call("debug_requests") == [SequenceInfo(**expected), SequenceInfo(**waiting)]
