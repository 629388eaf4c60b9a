"""Requests for vectors in the scheduler: they end with their last prompt token, and need no room for output."""

import pytest
from octavo_engine.core.replay import replay
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest
from octavo_engine.wire.plan import SeqResult, StepResult
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import EngineRequest, ErrorInfo
from octavo_engine.wire.sampling import SamplingParams

CONFIG = SchedulerConfig(
    max_model_len=64, num_blocks=8, block_size=8, max_num_seqs=4, max_num_batched_tokens=24, debug_invariants=True
)
VECTOR = b"\0\0\x80?"


def request(name, token_ids, **fields):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        params=SamplingParams(temperature=0, max_tokens=None),
        pooling=PoolingParams(normalize=True),
        **fields,
    )


def run(scheduler, errors=()):
    """Run all requests; return the outputs. A sequence in `errors` fails."""
    outputs = []
    while scheduler.has_work():
        plan = scheduler.step(0.0)
        ended = [step.seq_id for step in plan.seqs if step.sample]
        results = [
            SeqResult(seq_id=i, token_ids=[], error=ErrorInfo("NaN"))
            if i in errors
            else SeqResult(seq_id=i, token_ids=[], embedding=VECTOR)
            for i in ended
        ]
        outputs += scheduler.commit(StepResult(step_id=plan.step_id, seqs=results), 1.0)
    return outputs


def test_a_vector_ends_its_request():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("a", list(range(40))), 0.0)
    scheduler.add(request("b", [1, 2, 3]), 0.0)
    outputs = {out.request_id: out for out in run(scheduler)}
    assert {name: (out.embedding, out.finish_reason, out.token_ids) for name, out in outputs.items()} == {
        name: (VECTOR, "stop", []) for name in "ab"
    }
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.in_use_blocks) == (43, 0, 0)


def test_prompt_may_fill_the_context_and_the_cache():
    scheduler = Scheduler(CONFIG)
    for name in ("first", "all blocks cached"):
        scheduler.add(request(name, list(range(64))), 0.0)
        (output,) = run(scheduler)
        assert output.embedding == VECTOR
    assert output.num_cached_tokens == 56


def test_longer_prompts_are_refused():
    with pytest.raises(ContextLengthExceeded, match=r"64 tokens.* 65"):
        Scheduler(CONFIG).add(request("a", [1] * 65), 0.0)
    small = SchedulerConfig(max_model_len=64, num_blocks=7, block_size=8)
    with pytest.raises(InvalidRequest, match="57 tokens; the KV cache holds 56"):
        Scheduler(small).add(request("a", [1] * 57), 0.0)


def test_an_error_ends_only_its_sequence():
    scheduler = Scheduler(CONFIG)
    for name in "ab":
        scheduler.add(request(name, [1, 2, ord(name)]), 0.0)
    failed, ended = run(scheduler, errors={1})
    assert (failed.request_id, failed.finish_reason, failed.embedding) == ("a", "error", None)
    assert (ended.request_id, ended.finish_reason) == ("b", "stop")


def test_traces_replay():
    lines = []
    scheduler = TracingScheduler(CONFIG, lines.append)
    scheduler.add(request("a", list(range(40)), priority=1), 0.0)
    run(scheduler)
    assert replay(lines).divergence is None
    assert '"normalize":true' in lines[1]
