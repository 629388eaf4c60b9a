from octavo_engine.core.block_metrics import BlockLifeSampler, InstrumentedBlockPool
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import BlockLife, EngineRequest
from octavo_testing.clock import Clock
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids


def make_pool(num_blocks, every=1):
    clock = Clock()
    lives = BlockLifeSampler(every, clock)
    return clock, lives, InstrumentedBlockPool(num_blocks, lives=lives)


def fill(pool, block, block_hash=b"h"):
    pool.register(block, block_hash)
    pool.release([block])


def test_a_life_lasts_from_allocation_to_eviction():
    clock, lives, pool = make_pool(1)
    (block,) = pool.allocate(1)
    fill(pool, block)
    for clock.now_s in (2.0, 5.0):
        lives.record_use([block])
    clock.now_s = 9.0
    pool.allocate(1)
    assert lives.pop_ended() == [BlockLife(lifetime_s=9.0, idle_s=4.0, reuse_gaps_s=[2.0, 3.0])]
    assert lives.pop_ended() == []


def test_a_block_without_cached_content_has_no_life():
    clock, lives, pool = make_pool(1)
    pool.release(pool.allocate(1))
    clock.now_s = 3.0
    (block,) = pool.allocate(1)
    fill(pool, block)
    clock.now_s = 4.0
    pool.allocate(1)
    assert [life.lifetime_s for life in lives.pop_ended()] == [1.0]


def test_one_block_in_many_is_sampled():
    _, lives, pool = make_pool(100, every=10)
    for i, block in enumerate(pool.allocate(100)):
        fill(pool, block, bytes([i]))
    pool.allocate(100)
    assert len(lives.pop_ended()) == 10


def run(core, clock, name, prompt, at_s):
    clock.now_s = at_s
    request = EngineRequest(request_id=name, prompt_token_ids=text_ids(prompt), params=scripted("a"), eos_token_id=EOS)
    core.add(request)
    lives = []
    while core.has_work():
        lives += core.step().block_lives or []
    return lives


def test_the_engine_reports_lives_as_blocks_are_evicted():
    clock = Clock()
    config = SchedulerConfig(max_model_len=64, num_blocks=5, block_lives_every=1, debug_invariants=True)
    core = EngineCore(Scheduler(config), ScriptedExecutor(), clock=clock)
    assert run(core, clock, "first", "x" * 40, 0.0) == []
    assert run(core, clock, "again", "x" * 40, 10.0) == []
    lives = run(core, clock, "other", "y" * 62, 25.0)
    assert lives == [BlockLife(lifetime_s=25.0, idle_s=15.0, reuse_gaps_s=[10.0])]
    lives = run(core, clock, "third", "z" * 62, 30.0)
    assert BlockLife(lifetime_s=30.0, idle_s=20.0, reuse_gaps_s=[10.0]) in lives


def test_no_block_is_sampled_by_default():
    clock = Clock()
    core = EngineCore(Scheduler(SchedulerConfig(max_model_len=64, num_blocks=4)), ScriptedExecutor(), clock=clock)
    for i in range(3):
        assert run(core, clock, str(i), str(i) * 62, float(i)) == []
    assert core.step().block_lives is None
