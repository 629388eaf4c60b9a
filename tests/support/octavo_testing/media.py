"""Stand-ins for the processes that decode images."""

from concurrent.futures import Future

import numpy as np
from octavo_engine.media.worker import Arrays, Normalisation
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.records import ImageInput


class InstantWorkers:
    """Make an array of each file's bytes at once; an empty file is no picture. `started`: the files, in order."""

    size = 2
    normalisation = Normalisation(1 / 255, (0.5,), (0.5,))

    def __init__(self) -> None:
        self.started: list[bytes] = []

    def process(self, image: ImageInput) -> "Future[Arrays]":
        self.started.append(image.data)
        future: Future[Arrays] = Future()
        if image.data:
            future.set_result({"pixels": np.frombuffer(image.data, np.uint8).reshape(1, 1, -1)})
        else:
            future.set_exception(InvalidRequest("it is no picture."))
        return future

    def shutdown(self) -> None:
        """Do nothing: there are no processes."""


class HeldWorkers(InstantWorkers):
    """Keep the futures in `futures`, which a test ends."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size
        self.futures: list[Future[Arrays]] = []

    def process(self, image: ImageInput) -> "Future[Arrays]":
        self.started.append(image.data)
        self.futures.append(Future())
        return self.futures[-1]

    def finish(self, number: int, num_bytes: int = 1) -> None:
        self.futures[number].set_result({"pixels": np.zeros(num_bytes, np.uint8)})
