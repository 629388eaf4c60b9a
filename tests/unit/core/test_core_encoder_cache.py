"""`EncoderCache`: the images that a step encodes and drops. `SimExecutor` asserts that chunks with images have rows."""

from collections.abc import Iterable
from typing import Any

import pytest
from octavo_engine.core.replay import replay
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.wire.plan import StepCosts, StepPlan
from octavo_engine.wire.records import ErrorInfo, ImageInput
from octavo_testing.simulation import Simulation, sim_config
from octavo_testing.timed_steps import Arrival, timed_steps

ERROR = ErrorInfo("the tower broke")


def image(name: bytes, start: int = 0, length: int = 6) -> ImageInput:
    return ImageInput(start=start, length=length, digest=name * 32, data=b"")


def images(names: Iterable[str], *, every: int = 7, length: int = 6) -> tuple[ImageInput, ...]:
    """Return an image for each letter, `every` so many tokens."""
    return tuple(image(name.encode(), i * every, length) for i, name in enumerate(names))


def prompt(names: str) -> dict[str, Any]:
    """Return a request with images of six tokens, each followed by a token, and two more."""
    return {"prompt": [1] * (7 * len(names) + 2), "images": images(names), "max_tokens": 1}


def encoded(sim: Simulation, plan: StepPlan) -> str:
    """Return the letters of the images that a plan encodes."""
    news = {seq_id: seq.new for seq_id, seq in sim.executor.seqs.items()}
    return "".join(chr(news[seq_id].images[index].digest[0]) for seq_id, index in plan.encode)


def dropped(plan: StepPlan) -> str:
    return "".join(chr(digest[0]) for digest in plan.dropped_images)


def chunks(plan: StepPlan) -> list[tuple[int, int]]:
    return [(step.start, step.num_tokens) for step in plan.seqs]


@pytest.mark.parametrize(("size", "num_encoded"), [(32, 3), (24, 60)])
def test_conversations_whose_blocks_are_evicted_encode_each_image_once(size: int, num_encoded: int) -> None:
    """Three conversations of 20 turns take turns. A cache with room for two images encodes them again each time."""
    sim = Simulation(num_blocks=13, max_model_len=52, max_num_batched_tokens=size)
    for turn in range(20):
        for name in b"abc":
            shown = image(bytes([name]), 1, 10)
            sim.add(f"{name} {turn}", [name] * (28 + turn), images=(shown,), max_tokens=4)
            sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.prefix_cache_hits == 0, "the blocks of a conversation are evicted between its turns"
    assert stats.encoded_images == sim.executor.num_encoded == num_encoded
    assert stats.encoder_usage == 30 / 32 if size == 32 else 20 / 24


def test_a_chunk_ends_before_an_image_that_waits_for_room() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("r", **prompt("ab"))
    first = sim.tick()
    assert (encoded(sim, first), chunks(first)) == ("a", [(0, 7)])
    second = sim.tick()
    assert (encoded(sim, second), dropped(second), chunks(second)) == ("b", "a", [(7, 8)])
    sim.drain()
    sim.verify()


def test_an_image_is_kept_while_a_sequence_is_within_it() -> None:
    sim = Simulation(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    sim.add("within", **prompt("a"))
    sim.add("waits", **prompt("b"))
    plan = sim.tick()
    assert (encoded(sim, plan), chunks(plan)) == ("a", [(0, 3)])
    plan = sim.tick()
    assert (encoded(sim, plan), chunks(plan)) == ("", [(3, 3)])
    plan = sim.tick()
    assert (encoded(sim, plan), dropped(plan), chunks(plan)) == ("b", "a", [(6, 3), (0, 3)])
    sim.drain()
    sim.verify()


def test_a_sequence_within_an_image_keeps_it_before_an_earlier_one() -> None:
    sim = Simulation(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    sim.add("earlier", [1] * 14, images=(image(b"a", 6),), max_tokens=1)
    sim.add("within", [2] * 10, images=(image(b"b", 0, 8),), max_tokens=1)
    plans = [sim.tick() for _ in range(4)]
    assert [encoded(sim, plan) for plan in plans] == ["b", "", "", "a"]
    assert chunks(plans[2]) == [(6, 3)]
    sim.drain()
    sim.verify()
    assert sim.executor.num_encoded == 2


def test_the_images_that_were_used_last_are_kept() -> None:
    sim = Simulation(max_num_batched_tokens=18)
    for name in "abc":
        sim.add(name, **prompt(name))
        sim.drain()
    sim.scheduler.reset_prefix_cache = lambda: True  # type: ignore[method-assign]  # blocks only
    sim.add("again", [2, *prompt("a")["prompt"]], images=(image(b"a", 1),), max_tokens=1)
    sim.drain()
    sim.add("new", **prompt("d"))
    plan = sim.tick()
    assert (encoded(sim, plan), dropped(plan)) == ("d", "b")


def test_no_image_overtakes_one_that_waits_for_room() -> None:
    """`small` would fit, and a stream of such requests would hold the large one up."""
    sim = Simulation(max_num_batched_tokens=10, long_prefill_token_threshold=3)
    sim.add("within", [1] * 8, images=(image(b"w", 0, 6),))
    sim.tick()
    sim.add("large", [2] * 9, images=(image(b"l", 0, 8),))
    sim.add("small", [3] * 9, images=(image(b"s", 0, 3),))
    sim.add("text", [4] * 2)
    plan = sim.tick()
    assert encoded(sim, plan) == ""
    assert chunks(plan) == [(3, 3), (0, 2)], "texts go on"
    assert encoded(sim, sim.tick()) == "l"
    sim.drain()
    sim.verify()


def test_an_image_larger_than_a_step_fits_alone() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("r", [1] * 22, images=(image(b"a", 0, 10), image(b"b", 10, 10)), max_tokens=1)
    sim.drain()
    sim.verify()
    assert (sim.executor.num_encoded, sim.executor.most_rows) == (2, 10)


def test_without_chunks_a_prompt_waits_for_all_its_images() -> None:
    limits: dict[str, Any] = {"max_model_len": 32, "max_num_batched_tokens": 32, "num_blocks": 32}
    sim = Simulation(enable_chunked_prefill=False, **limits)
    sim.add("both", [1] * 23, images=(image(b"a", 0, 11), image(b"b", 11, 11)), max_tokens=1)
    sim.drain()
    sim.add("hit", [1] * 24, images=(image(b"a", 0, 11), image(b"b", 11, 11)), max_tokens=1)
    sim.add("other", [2] * 24, images=(image(b"c", 0, 22),), max_tokens=1)
    plan = sim.tick()
    assert chunks(plan) == [(20, 4)], "the last tokens of `b` need its rows, beside which `c` has no room"
    plan = sim.tick()
    assert (encoded(sim, plan), chunks(plan)) == ("c", [(0, 24)])
    sim.verify()


def test_a_hit_that_ends_inside_an_image_needs_its_rows() -> None:
    sim = Simulation(max_num_batched_tokens=6)
    sim.add("first", [1] * 8, images=(image(b"a"),), max_tokens=1)
    sim.drain()
    sim.add("other", [2] * 8, images=(image(b"b"),), max_tokens=1)
    sim.drain()
    sim.add("hit", [1] * 5 + [1, 9, 9], images=(image(b"a"),), max_tokens=1)
    plan = sim.tick()
    assert (encoded(sim, plan), chunks(plan)) == ("a", [(4, 4)])
    sim.add("behind", [1] * 8 + [3, 3], images=(image(b"a"),), max_tokens=1)
    assert encoded(sim, sim.tick()) == "", "the image is cached"
    sim.drain()
    sim.verify()


def test_a_preempted_sequence_has_its_image_encoded_again_if_the_rows_are_gone() -> None:
    sim = Simulation(num_blocks=8, max_num_batched_tokens=6, enable_prefix_caching=False)
    sim.add("old", [1] * 7, max_tokens=25)
    sim.tick()
    sim.add("seen", [2] * 7, images=(image(b"a"),), max_tokens=12)
    sim.add("other", [3] * 7, images=(image(b"b"),), max_tokens=12)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().preemptions
    assert sim.executor.num_encoded > 2


def fail(sim: Simulation, position: int = 0) -> None:
    """Let a sequence of the latest step fail, and commit the step."""
    result = sim.results[0].seqs[position]
    result.token_ids, result.error = [], ERROR
    sim.commit()


def test_an_image_that_failed_is_encoded_when_it_is_asked_again() -> None:
    sim = Simulation()
    sim.add("bad", **prompt("a"))
    sim.add("good", **prompt("b"))
    sim.prepare_all()
    assert encoded(sim, sim.step()) == "ab"
    fail(sim)
    sim.add("again", **prompt("a"))
    sim.add("more", [5] * 9, images=(image(b"b"),))
    plan = sim.tick()
    assert (dropped(plan), encoded(sim, plan)) == ("a", "a")
    sim.drain()
    sim.verify()


def test_after_a_failed_step_all_rows_are_dropped_also_those_that_it_should_have_dropped() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("a", **prompt("a"))
    sim.drain()
    sim.add("b", **prompt("b"))
    sim.prepare_all()
    assert dropped(sim.step()) == "a"
    sim.commit(error="the device is on fire")
    sim.add("c", **prompt("b"))
    plan = sim.tick()
    assert sorted(dropped(plan)) == ["a", "b"]
    assert encoded(sim, plan) == "b"
    sim.drain()
    sim.verify()


def test_a_reset_drops_all_rows() -> None:
    sim = Simulation()
    sim.add("a", **prompt("a"))
    sim.drain()
    assert sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.stats().encoder_usage == 0
    sim.add("again", **prompt("a"))
    plan = sim.tick()
    assert (dropped(plan), encoded(sim, plan)) == ("a", "a")


def test_a_trace_has_what_is_encoded_and_dropped_and_replays() -> None:
    lines: list[str] = []
    sim = Simulation(scheduler=TracingScheduler(sim_config(max_num_batched_tokens=8), lines.append))
    sim.add("r", **prompt("ab"))
    sim.drain()
    (line,) = [line for line in lines if "drop_images" in line]
    assert f'"drop_images":["{(b"a" * 32).hex()}"],"encode":[[1,1]]' in line
    assert replay(lines).ok
    changed = [line.replace('"encode":[[1,1]]', '"encode":[[1,0]]') for line in lines]
    assert not replay(changed).ok


MEASURED = StepCosts(step_s=0.02, prefill_token_s=0.001)
LIMITED: dict[str, Any] = {"max_step_ms": 200.0, "max_model_len": 256, "num_blocks": 80, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    ("token_s", "expected"),
    [
        (0.0, "a"),  # not measured yet
        (0.001, "abcd"),  # 6 ms each
        (0.02, "ab"),  # 120 ms each: the first one is free
        (1.0, "a"),
    ],
)
def test_a_step_encodes_as_many_images_as_its_time_has_room_for(token_s: float, expected: str) -> None:
    sim = Simulation(costs=StepCosts(step_s=0.02, prefill_token_s=0.001, image_token_s=token_s), **LIMITED)
    for name in "abcd":
        sim.add(name, **prompt(name))
    assert encoded(sim, sim.tick()) == expected
    sim.drain()
    sim.verify()


def test_the_first_prompt_gets_its_image_first() -> None:
    sim = Simulation(costs=MEASURED, **LIMITED)
    for name in "abcd":
        sim.add(name, **prompt(name * 2))
    found = [encoded(sim, sim.tick()) for _ in range(5)]
    assert found[:4] == ["a", "b", "c", "d"]
    sim.drain()
    sim.verify()


def test_an_image_that_waits_holds_up_no_text() -> None:
    sim = Simulation(costs=MEASURED, **LIMITED)
    for name in "abcd":
        sim.add(name, **prompt(name))
    sim.add("text", [9] * 20, max_tokens=1)
    sim.tick()
    assert sim.received["text", 0].last is not None


@pytest.mark.parametrize(("token_s", "noise"), [(0.02, 0.0), (0.001, 0.0), (0.0005, 0.1)])
def test_the_gap_of_streams_beside_images_is_the_limit_and_one_image(token_s: float, noise: float) -> None:
    """16 requests of 4 images of 64 tokens beside 8 streams."""
    machine = StepCosts(step_s=0.02, prefill_token_s=0.001, context_token_s=1e-6, image_token_s=token_s)
    run = timed_steps(machine, noise=noise, max_step_ms=200.0)
    shown = [images([chr(64 + 4 * i + j) for j in range(4)], every=80, length=64) for i in range(16)]
    streams = [Arrival(0.0, [i] * 10, 400) for i in range(8)]
    run.run([*streams, *(Arrival(2.0, [1] * 330, 4, shown[i]) for i in range(16))])
    assert run.scheduler.stats().encoded_images == 64
    beside = [step for step in run.steps if step.num_seqs >= 8 and step.encode_s]
    assert len(beside) > 5, "the images are encoded beside the streams"
    most = max(step.seconds for step in beside)
    assert most <= (0.2 + 64 * token_s) * (1 + 4 * noise) + 5 * machine.prefill_token_s
    if token_s <= 0.001:
        assert max(step.encode_s for step in beside) > 1.5 * 64 * token_s, "several fit into a step"


def test_a_prompt_that_waits_for_room_leaves_the_only_token_of_a_step_to_another() -> None:
    """The request of tenant b is within the image that would have to go for one of the others."""
    sim = Simulation(num_blocks=3, max_num_seqs=2, max_model_len=12, max_num_batched_tokens=1)
    for i in range(9):
        fields: dict[str, Any] = {"n": 1 + (i == 0), "max_tokens": 3, "tenant": "b" * (i == 3)}
        sim.add(f"r{i}", [0] * 6, images=(image(b"a", 0, 5),), **fields)
    sim.add("within", [0] * 3, images=(image(b"b", 0, 2),), max_tokens=3, tenant="b")
    sim.drain(depth=2)
    sim.verify()
