"""A request with images waits for them; an image that cannot be read ends this request only, as a fault of its own."""

from typing import Any

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.process.messages import Add, decode_to_core, encode
from octavo_engine.wire.errors import InvalidRequest, OctavoError, Unavailable
from octavo_engine.wire.records import EngineRequest, ImageInput
from octavo_testing.media import HeldWorkers
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids
from octavo_testing.simulation import sim_config


class Bench:
    """An engine core whose images are processed when a test ends their futures. `max_bytes`: of the cache."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.workers, self.executor = HeldWorkers(), ScriptedExecutor()
        self.images = self.executor.images = ProcessedImages(self.workers, max_bytes)
        self.core = EngineCore(Scheduler(sim_config()), self.executor)

    def run(self) -> dict[str, tuple[str, Any]]:
        """Step while there is work; return finish reason and error of the requests that ended."""
        ended = {}
        while self.core.has_work():
            for out in self.core.step().outputs:
                if out.finish_reason is not None:
                    ended[out.request_id] = out.finish_reason, out.error
        return ended

    def has(self, image: ImageInput) -> bool:
        try:
            return bool(self.images.arrays(image.digest))
        except KeyError:
            return False


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(name: str, *starts: int, **fields: Any) -> EngineRequest:
    images = tuple(ImageInput(start=i, length=2, digest=bytes([i]) * 32, grid=(1, 2), data=bytes([i])) for i in starts)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=text_ids("x" * 12),
        params=scripted("ab"),
        eos_token_id=EOS,
        images=images,
        **fields,
    )


def test_a_request_runs_once_all_its_images_are_ready(bench: Bench) -> None:
    bench.core.add(request("image", 0, 4))
    bench.core.add(request("text"))
    assert bench.run() == {"text": ("stop", None)}
    bench.workers.finish(0)
    assert bench.run() == {}
    bench.workers.finish(1)
    assert bench.run() == {"image": ("stop", None)}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("it is cut."), "invalid_request"),
        (Unavailable("it was killed.", retry_after_s=1), "unavailable"),
    ],
)
def test_an_image_that_cannot_be_read_ends_its_request_only(bench: Bench, error: OctavoError, kind: str) -> None:
    bench.core.add(request("bad", 0, 4))
    bench.core.add(request("good", 2))
    bench.workers.futures[1].set_exception(error)
    bench.workers.finish(0)
    bench.workers.finish(2)
    ended = bench.run()
    assert ended["good"] == ("stop", None)
    reason, info = ended["bad"]
    assert (reason, info.kind) == ("error", kind)
    assert info.message.startswith("Image 2 of the prompt: it ")


def test_a_model_without_images_refuses_them() -> None:
    core = EngineCore(Scheduler(sim_config()), ScriptedExecutor())
    core.add(request("image", 0))
    (out,) = core.step().outputs
    assert out.error is not None
    assert out.error.kind == "invalid_request"


def test_arrays_are_kept_until_their_request_has_encoded_them() -> None:
    bench = Bench(max_bytes=0)
    sent = request("image", 0)
    bench.core.add(sent)
    bench.workers.finish(0)
    assert bench.has(sent.images[0])
    while not bench.executor.plans:
        bench.core.step()
    assert not bench.has(sent.images[0])
    assert bench.run() == {"image": ("stop", None)}


def test_an_abort_drops_arrays_and_what_is_not_begun() -> None:
    bench = Bench(max_bytes=0)
    sent = request("image", 0, 2, 4)
    bench.core.add(sent)
    bench.workers.finish(0)
    bench.core.abort("image")
    bench.run()
    assert not any(map(bench.has, sent.images))
    bench.workers.finish(1)
    assert len(bench.workers.started) <= 3
    assert not any(map(bench.has, sent.images))


def test_images_pass_from_the_front_end_to_the_core() -> None:
    sent = request("image", 0, 4)
    received = decode_to_core(encode(Add(request=sent)))
    assert isinstance(received, Add)
    assert received.request == sent
