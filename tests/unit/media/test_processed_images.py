"""`ProcessedImages`: each image is processed once, arrays fit into the limit, and requests wait for room in order."""

from collections.abc import Sequence
from concurrent.futures import Future
from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.records import ImageInput
from octavo_testing.media import HeldWorkers


def image(name: str) -> ImageInput:
    return ImageInput(start=0, length=1, digest=sha256(name.encode()).digest(), data=name.encode())


class Bench:
    def __init__(self, max_bytes: int = 100, size: int = 2) -> None:
        self.workers = HeldWorkers(size)
        self.images = ProcessedImages(self.workers, max_bytes)
        self.num_done = 0

    def acquire(self, request_id: str, *names: str, tenant: str = "") -> "list[Future[object]]":
        return self.images.acquire(request_id, [image(name) for name in names], tenant)

    def finish(self, num_bytes: int = 10) -> None:
        """End the oldest image in progress."""
        self.num_done += 1
        self.workers.finish(self.num_done - 1, num_bytes)

    def finish_all(self, num_bytes: int = 10) -> None:
        while self.num_done < len(self.workers.futures):
            self.finish(num_bytes)

    def names(self) -> list[str]:
        return [data.decode() for data in self.workers.started]

    def has(self, name: str) -> bool:
        try:
            return bool(self.images.arrays(image(name).digest))
        except KeyError:
            return False


def done(futures: "Sequence[Future[object]]") -> list[bool]:
    return [future.done() for future in futures]


def test_an_image_is_processed_once_for_requests_at_a_time_and_later() -> None:
    bench = Bench()
    first, second = bench.acquire("one", "a", "a"), bench.acquire("two", "a")
    bench.finish()
    assert done([*first, *second]) == [True] * 3
    bench.images.release("one")
    bench.images.release("two")
    assert done(bench.acquire("three", "a")) == [True]
    assert bench.names() == ["a"]
    assert (bench.images.num_queries, bench.images.num_hits) == (4, 3)


def test_as_many_images_as_there_are_workers_are_in_progress() -> None:
    bench = Bench(size=2)
    futures = bench.acquire("one", "a", "b", "c")
    assert bench.names() == ["a", "b"]
    bench.finish()
    assert bench.names() == ["a", "b", "c"]
    bench.finish_all()
    assert done(futures) == [True] * 3


def test_the_least_recently_used_images_are_dropped() -> None:
    bench = Bench(max_bytes=30)
    for name in "abc":
        bench.acquire(name, name)
        bench.finish()
        bench.images.release(name)
    bench.acquire("again", "a")
    bench.images.release("again")
    bench.acquire("d", "d")
    bench.finish()
    assert [bench.has(name) for name in "abcd"] == [True, False, True, True]


def test_images_that_a_request_holds_stay_beyond_the_limit() -> None:
    bench = Bench(max_bytes=15)
    bench.acquire("one", "a", "b")
    bench.finish_all()
    assert (bench.has("a"), bench.has("b")) == (True, True)
    bench.images.release("one")
    assert [bench.has("a"), bench.has("b")] == [False, True]


def test_nothing_is_kept_without_a_cache() -> None:
    bench = Bench(max_bytes=0)
    bench.acquire("one", "a")
    bench.finish()
    assert bench.has("a")
    bench.images.release("one")
    assert not bench.has("a")


def test_tenants_take_turns() -> None:
    bench = Bench(size=1)
    for number in range(100):
        bench.acquire(f"mallory-{number}", f"m{number}", tenant="mallory")
    for number in range(3):
        bench.acquire(f"alice-{number}", f"a{number}", tenant="alice")
    bench.acquire("", "n")
    bench.images.release("alice-1")
    for _ in range(5):
        bench.finish()
    assert bench.names() == ["m0", "m1", "a0", "n", "m2", "a2"]
    for number in range(100):
        bench.images.release(f"mallory-{number}")
    assert bench.images._waiting == {}


def test_requests_wait_for_room_in_order() -> None:
    bench = Bench(max_bytes=20, size=1)
    first, second, third = (bench.acquire(name, name, name + "2") for name in "abc")
    bench.finish()
    bench.finish()
    assert done([*first, *second, *third]) == [True, True, False, False, False, False]
    assert bench.names() == ["a", "a2"]
    bench.images.release("a")
    bench.finish_all()
    assert (done(second), done(third)) == ([True, True], [False, False])
    bench.images.release("b")
    bench.finish_all()
    assert done(third) == [True, True]


def test_a_request_that_has_begun_gets_all_its_images_whatever_they_need() -> None:
    bench = Bench(max_bytes=5, size=1)
    futures = bench.acquire("one", "a", "b", "c")
    bench.finish_all(num_bytes=100)
    assert done(futures) == [True] * 3


def test_requests_that_hold_images_get_further_ones_without_room() -> None:
    """Their blocks were evicted before they ran. Each would wait for room that only the other one can give."""
    bench = Bench(max_bytes=20, size=2)
    bench.acquire("one", "a")
    bench.acquire("two", "b")
    bench.finish_all()
    waiting = bench.acquire("three", "c")
    futures = [*bench.acquire("one", "a2", "a"), *bench.acquire("two", "b2", "b")]
    bench.finish_all()
    assert done([*futures, *waiting]) == [True] * 4 + [False]
    bench.images.release("one")
    bench.images.release("two")
    bench.finish_all()
    assert done(waiting) == [True]


def test_a_failure_is_that_of_all_who_wait_and_is_not_kept() -> None:
    bench = Bench()
    futures = [*bench.acquire("one", "a"), *bench.acquire("two", "a")]
    bench.workers.futures[0].set_exception(InvalidRequest("it is cut."))
    assert [str(future.exception()) for future in futures] == ["it is cut."] * 2
    bench.images.release("one")
    bench.acquire("three", "a")
    assert bench.names() == ["a", "a"]


def test_a_request_that_leaves_is_not_processed() -> None:
    bench = Bench(size=1)
    for name in "abc":
        bench.acquire(name, name)
    bench.images.release("b")
    bench.images.release("c")
    bench.finish_all()
    assert bench.names() == ["a"]


def test_a_reset_drops_what_no_request_holds() -> None:
    bench = Bench()
    bench.acquire("one", "a")
    bench.acquire("two", "b")
    bench.finish_all()
    bench.images.release("one")
    bench.images.reset()
    assert (bench.has("a"), bench.has("b")) == (False, True)


REQUESTS = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), min_size=1, max_size=8)


@settings(max_examples=100)
@given(REQUESTS, st.integers(0, 40), st.integers(1, 3), st.data())
def test_every_request_ends_and_arrays_fit(
    requests: list[list[str]], max_bytes: int, size: int, data: st.DataObject
) -> None:
    """In any order of results and departures: no request waits for ever, and none that is done lacks an image."""
    bench = Bench(max_bytes, size)
    live = {str(i): (names, bench.acquire(str(i), *names)) for i, names in enumerate(requests)}
    open_ones = set[int]()
    while live or open_ones:
        open_ones |= {*range(bench.num_done, len(bench.workers.futures))}
        bench.num_done = len(bench.workers.futures)
        ready = [request_id for request_id, (_, futures) in live.items() if all(done(futures))]
        assert ready or open_ones, "all requests wait"
        assert len(open_ones) <= size
        for request_id in ready:
            assert all(map(bench.has, live[request_id][0]))
        if live and (not open_ones or data.draw(st.booleans())):
            leaving = data.draw(st.sampled_from(sorted(live) if open_ones else ready))
            bench.images.release(leaving)
            del live[leaving]
        else:
            number = data.draw(st.sampled_from(sorted(open_ones)))
            open_ones.remove(number)
            bench.workers.finish(number, 10)
    assert bench.images._held_bytes == 0
    assert bench.images._num_bytes <= max_bytes
