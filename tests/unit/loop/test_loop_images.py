"""A request with images waits for them; an image that cannot be read ends this request only, as a fault of its own."""

import gc
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.process.messages import Add, decode_to_core, encode
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.records import EngineRequest, ImageInput
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids
from octavo_testing.simulation import sim_config


class Pixels:
    """The result of a decoded image."""


class ImageExecutor(ScriptedExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[ImageInput, Future[object]]] = []

    def prepare_image(self, image: ImageInput) -> Future[object]:
        self.images.append((image, Future()))
        return self.images[-1][1]


@pytest.fixture
def executor() -> ImageExecutor:
    return ImageExecutor()


@pytest.fixture
def core(executor: ImageExecutor) -> EngineCore:
    return EngineCore(Scheduler(sim_config()), executor)


def request(name: str, *starts: int, **fields: Any) -> EngineRequest:
    images = tuple(ImageInput(start=i, length=2, digest=bytes([i]) * 32, grid=(1, 2), data=b"x") for i in starts)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=text_ids("x" * 12),
        params=scripted("ab"),
        eos_token_id=EOS,
        images=images,
        **fields,
    )


def run(core: EngineCore) -> dict[str, tuple[str, Any]]:
    """Step while there is work; return finish reason and error of the requests that ended."""
    ended = {}
    while core.has_work():
        for out in core.step().outputs:
            if out.finish_reason is not None:
                ended[out.request_id] = out.finish_reason, out.error
    return ended


def test_a_request_runs_once_all_its_images_are_ready(core: EngineCore, executor: ImageExecutor) -> None:
    core.add(request("image", 0, 4))
    core.add(request("text"))
    assert run(core) == {"text": ("stop", None)}
    executor.images[0][1].set_result(object())
    assert run(core) == {}
    executor.images[1][1].set_result(object())
    assert run(core) == {"image": ("stop", None)}


def test_an_image_that_cannot_be_read_ends_its_request_only(core: EngineCore, executor: ImageExecutor) -> None:
    core.add(request("good", 0))
    core.add(request("bad", 0, 4))
    good, _, second = (future for _, future in executor.images)
    second.set_exception(InvalidRequest("it is truncated.", param="images"))
    good.set_result(object())
    ended = run(core)
    assert ended["good"] == ("stop", None)
    reason, error = ended["bad"]
    assert (reason, error.kind) == ("error", "invalid_request")
    assert "Image 2" in error.message


@pytest.mark.parametrize("ends_by", ["stop", "abort"])
def test_pixels_are_kept_until_the_request_ends(core: EngineCore, executor: ImageExecutor, ends_by: str) -> None:
    core.add(request("image", 0))
    pixels = Pixels()
    alive = weakref.ref(pixels)
    executor.images.pop()[1].set_result(pixels)
    del pixels
    core.step()
    gc.collect()
    assert alive() is not None
    if ends_by == "abort":
        core.abort("image")
    run(core)
    gc.collect()
    assert alive() is None


def test_images_pass_from_the_front_end_to_the_core() -> None:
    sent = request("image", 0, 4)
    received = decode_to_core(encode(Add(request=sent)))
    assert isinstance(received, Add)
    assert received.request == sent
