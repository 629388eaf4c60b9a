"""`ProcessedImages`: stores the arrays of processed images, once for all requests that show them, up to a memory limit.

A request holds its images from its beginning until they are encoded. Images that no request holds are a cache, whose
least recently used images are dropped to keep the limit. When held images reach the limit, new requests wait, and
tenants take turns. A request that has begun gets all of its images, even those that it needs again because their blocks
were evicted, so that requests cannot wait for each other in a cycle.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from octavo_engine.media.worker import Arrays, Normalisation
from octavo_engine.wire.records import ImageInput

#: Memory for images that wait for their encoding where nothing is cached.
UNCACHED_BYTES = 1 << 30


class Workers(Protocol):
    """`process` runs `size` images at a time; its future may raise InvalidRequest and Unavailable."""

    size: int
    normalisation: Normalisation

    def process(self, image: ImageInput) -> "Future[Arrays]": ...

    def shutdown(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Image:
    """`source`: the image file, until it is processed. `futures`: futures of requests that wait for the arrays."""

    digest: bytes
    source: ImageInput | None
    arrays: Arrays | None = None
    num_bytes: int = 0
    holders: set[str] = field(default_factory=set)
    futures: "list[Future[object]]" = field(default_factory=list)


class ProcessedImages:
    """Images are identified by their digests. `max_bytes`: size of the cache; with 0, images are dropped once no
    request holds them."""

    def __init__(self, workers: Workers, max_bytes: int) -> None:
        self.normalisation = workers.normalisation
        self.num_queries = self.num_hits = 0
        self._workers, self._max_bytes, self._room_bytes = workers, max_bytes, max_bytes or UNCACHED_BYTES
        self._lock = threading.RLock()  # worker threads deliver results
        self._images: OrderedDict[bytes, _Image] = OrderedDict()  # least recently used first
        #: Tenant -> request -> images, in order; the tenant whose turn is next comes first.
        self._waiting: dict[str, dict[str, list[tuple[ImageInput, Future[object]]]]] = {}
        self._held: dict[str, list[_Image]] = {}  # by request
        self._queue: deque[_Image] = deque()  # of requests that have begun
        self._num_running = self._num_bytes = self._held_bytes = 0

    def acquire(self, request_id: str, images: Sequence[ImageInput], tenant: str = "") -> "list[Future[object]]":
        """Process a request's images. An image's future is done once `arrays` has it; it is kept until `release`."""
        futures = [Future[object]() for _ in images]
        with self._lock:
            if request_id in self._held:  # it may hold the room that it would wait for
                for image, future in zip(images, futures, strict=True):
                    self._hold(request_id, image, future)
            else:
                requests = self._waiting.setdefault(tenant, {})
                requests.setdefault(request_id, []).extend(zip(images, futures, strict=True))
            self._advance()
        return futures

    def release(self, request_id: str) -> None:
        """Release the images of a request, if it holds any, and stop processing them."""
        with self._lock:
            for tenant, requests in [*self._waiting.items()]:
                if requests.pop(request_id, None) is not None and not requests:
                    del self._waiting[tenant]
            for image in self._held.pop(request_id, ()):
                if request_id in image.holders:
                    image.holders.remove(request_id)
                    self._held_bytes -= 0 if image.holders else image.num_bytes
            self._drop(self._max_bytes)
            self._advance()

    def arrays(self, digest: bytes) -> Arrays:
        """Return the arrays of an image that a request holds. Raises KeyError if the image is not processed yet."""
        with self._lock:
            arrays = self._images[digest].arrays
        if arrays is None:
            raise KeyError("the image is not processed yet")
        return arrays

    def reset(self) -> None:
        """Drop the images that no request holds."""
        with self._lock:
            self._drop(0)

    def shutdown(self) -> None:
        self._workers.shutdown()

    def _advance(self) -> None:
        """Give images to free workers. Begin the next request if there is space, and if a worker is free or all of its
        images are processed."""
        while True:
            is_free = self._num_running < self._workers.size
            if self._queue and is_free:
                self._process(self._queue.popleft())
            elif self._waiting and not self._queue and self._held_bytes < self._room_bytes:
                tenant, requests = next(iter(self._waiting.items()))
                request_id, images = next(iter(requests.items()))
                if not is_free and not all(image.digest in self._images for image, _ in images):
                    return
                del requests[request_id], self._waiting[tenant]
                if requests:
                    self._waiting[tenant] = requests
                for image, future in images:
                    self._hold(request_id, image, future)
            else:
                return

    def _hold(self, request_id: str, wanted: ImageInput, future: "Future[object]") -> None:
        image = self._images.get(wanted.digest)
        self.num_queries += 1
        self.num_hits += image is not None
        if image is None:
            image = self._images[wanted.digest] = _Image(wanted.digest, wanted)
            self._queue.append(image)
        self._images.move_to_end(wanted.digest)
        self._held_bytes += 0 if image.holders else image.num_bytes
        image.holders.add(request_id)
        self._held.setdefault(request_id, []).append(image)
        if image.arrays is None:
            image.futures.append(future)
        else:
            future.set_result(None)

    def _process(self, image: _Image) -> None:
        if not image.holders:  # their requests have ended
            del self._images[image.digest]
            return
        assert image.source is not None, "an image is processed once"
        self._num_running += 1
        self._workers.process(image.source).add_done_callback(partial(self._finish, image))

    def _finish(self, image: _Image, done: "Future[Arrays]") -> None:
        if done.cancelled():  # by the shutdown
            return
        with self._lock:
            self._num_running -= 1
            image.source, futures, image.futures = None, image.futures, []
            if (error := done.exception()) is not None:
                del self._images[image.digest]
                image.holders.clear()
                for future in futures:
                    future.set_exception(error)
            else:
                image.arrays = done.result()
                image.num_bytes = sum(array.nbytes for array in image.arrays.values())
                self._num_bytes += image.num_bytes
                self._held_bytes += image.num_bytes if image.holders else 0
                for future in futures:
                    future.set_result(None)
                self._drop(self._max_bytes)
            self._advance()

    def _drop(self, max_bytes: int) -> None:
        """Drop images that no request holds until all together have at most `max_bytes`."""
        for image in [*self._images.values()] if self._num_bytes > max_bytes else ():
            if self._num_bytes > max_bytes and image.arrays is not None and not image.holders:
                self._num_bytes -= image.num_bytes
                del self._images[image.digest]
