"""Images in the scheduler: block hashes depend on them, plans and traces have their places without their bytes."""

import json
from collections.abc import Callable

import pytest
from octavo_engine.core.replay import replay
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.wire.hashing import block_hashes, image_extra, next_hash
from octavo_engine.wire.plan import SeqResult, StepResult
from octavo_engine.wire.records import EngineRequest, ErrorInfo, ImageInput
from octavo_testing.simulation import sim_config, sim_request

PROMPT = list(range(1, 21))  # five blocks of four tokens


def image(start: int, length: int, name: bytes) -> ImageInput:
    return ImageInput(start=start, length=length, digest=name * 32, grid=(1, length), data=b"the bytes of " + name)


def request(name: str, *images: ImageInput) -> EngineRequest:
    asked = sim_request(name, PROMPT, max_tokens=1)
    asked.images = images
    return asked


def prepare(scheduler: Scheduler) -> None:
    """Prepare the images that the scheduler waits for."""
    for waiting, _ in scheduler.unprepared:
        scheduler.prepared(waiting.request_id, 0.5)


def run(scheduler: Scheduler, asked: EngineRequest) -> int:
    """Run a request to its end; return its number of cached tokens."""
    scheduler.add(asked, 0.0)
    prepare(scheduler)
    while not (plan := scheduler.step(1.0)).seqs:
        prepare(scheduler)
    result = StepResult(step_id=plan.step_id, seqs=[SeqResult(seq_id=plan.seqs[0].seq_id, token_ids=[7])])
    (output,) = scheduler.commit(result, 2.0)
    return output.num_cached_tokens


def test_the_hashes_of_blocks_follow_the_definition() -> None:
    scheduler = Scheduler(sim_config())
    images = (image(2, 7, b"a"), image(10, 3, b"b"))
    run(scheduler, request("r", *images))
    expected, prev = [], scheduler.config.hash_root
    for first in range(0, 20, 4):
        spans = [(each.start, each.end, each.digest) for each in images]
        prev = next_hash(prev, PROMPT[first : first + 4], image_extra(spans, first, first + 4))
        expected.append(prev)
    assert {found for _, found in scheduler.cached_hashes()} == set(expected)


def test_images_whose_blocks_are_in_host_memory_are_not_prepared() -> None:
    scheduler = Scheduler(sim_config(num_blocks=6, num_host_blocks=16))
    asked = image(2, 7, b"a")
    run(scheduler, request("first", asked))
    run(scheduler, sim_request("other", [*range(50, 70)], max_tokens=1))  # evicts the blocks of the first one
    scheduler.add(request("second", asked), 3.0)
    assert scheduler.unprepared == []
    plan = scheduler.step(4.0)
    assert (plan.encode, plan.seqs[0].start) == ([], 19)


def test_kv_events_name_the_images_and_the_adapter_of_blocks() -> None:
    scheduler = Scheduler(sim_config(), kv_tokens=True)
    asked = request("r", image(2, 7, b"a"), image(10, 2, b"b"))
    asked.adapter, asked.cache_salt = "a hash", "salt"
    run(scheduler, asked)
    blocks = scheduler.take_kv_delta().blocks
    assert [block.token_ids for block in blocks] == [PROMPT[at : at + 4] for at in range(0, 20, 4)]
    a, b = b"a" * 32, b"b" * 32
    assert [block.images for block in blocks] == [[(a, 2)], [(a, -2)], [(a, -6), (b, 2)], [], []]
    assert {(block.adapter, block.salt) for block in blocks} == {("a hash", "salt")}


def test_text_keeps_its_hashes() -> None:
    scheduler = Scheduler(sim_config())
    run(scheduler, request("r"))
    assert {found for _, found in scheduler.cached_hashes()} == set(block_hashes(scheduler.config.hash_root, PROMPT, 4))


@pytest.mark.parametrize(
    ("other", "num_cached"),
    [
        ((image(9, 4, b"a"),), 19),  # the last token is computed for its logits
        ((image(9, 4, b"b"),), 8),
        ((image(9, 3, b"a"),), 12),
        ((image(10, 4, b"a"),), 8),
        ((), 8),
        ((image(3, 2, b"a"), image(9, 4, b"a")), 0),
    ],
)
def test_blocks_are_shared_up_to_the_first_other_image(other: tuple[ImageInput, ...], num_cached: int) -> None:
    scheduler = Scheduler(sim_config())
    run(scheduler, request("first", image(9, 4, b"a")))
    assert run(scheduler, request("second", *other)) == num_cached


def test_a_plan_has_the_places_of_images_without_their_bytes() -> None:
    scheduler = Scheduler(sim_config())
    asked = request("r", image(2, 7, b"a"))
    scheduler.add(asked, 0.0)
    prepare(scheduler)
    (new,) = scheduler.step(1.0).new_seqs
    assert new.images == (asked.images[0].span,)
    assert new.images[0].grid == (1, 7)
    assert not hasattr(new.images[0], "data")


def test_a_trace_replays_images_without_their_bytes() -> None:
    lines: list[str] = []
    write: Callable[[str], object] = lines.append
    scheduler = TracingScheduler(sim_config(), write)
    run(scheduler, request("first", image(9, 4, b"a")))
    run(scheduler, request("second", image(9, 4, b"a")))
    run(scheduler, request("third", image(9, 4, b"b")))
    report = replay(lines)
    assert report.ok, str(report)
    assert json.loads(lines[1])["add"]["images"] == [[9, 4, (b"a" * 32).hex()]]
    assert "the bytes" not in "".join(lines)


def test_an_output_waits_for_images_that_have_failed_for_another_one() -> None:
    """Both outputs need the image again after a preemption; the first one to ask for it ends alone."""
    scheduler = Scheduler(sim_config(enable_prefix_caching=False))
    asked = sim_request("r", PROMPT, max_tokens=9, n=2)
    asked.images = (image(2, 7, b"a"),)
    scheduler.add(asked, 0.0)
    prepare(scheduler)
    plan = scheduler.step(1.0)
    scheduler.commit(
        StepResult(step_id=plan.step_id, seqs=[SeqResult(seq_id=s.seq_id, token_ids=[7]) for s in plan.seqs]), 1.0
    )
    first, second = scheduler.sequences()
    for seq, error in ((second, ErrorInfo("it was killed.", "unavailable")), (first, None)):
        scheduler._state.preempt(seq, swap=False)
        plan = scheduler.step(2.0)
        assert [(request.request_id, start) for request, start in scheduler.unprepared] == [("r", 0)]
        assert not plan.encode
        ended = scheduler.prepared("r", 2.0, error=error)
        assert [out.index for out in ended] == ([1] if error else [])
        if plan.seqs:
            scheduler.commit(
                StepResult(step_id=plan.step_id, seqs=[SeqResult(seq_id=first.seq_id, token_ids=[7])]), 2.0
            )
    assert [step.seq_id for step in scheduler.step(3.0).seqs] == [first.seq_id]


def test_a_request_waits_for_its_images() -> None:
    scheduler = Scheduler(sim_config())
    scheduler.add(request("r", image(2, 7, b"a")), 0.0)
    assert scheduler.waiting_reason("r") == "images"
