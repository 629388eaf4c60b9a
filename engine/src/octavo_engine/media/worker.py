"""Processes that decode images: `MediaWorkers` starts them and sends image files; `main` runs in each of them.

A malicious file may crash a decoder, fill the memory or decode without end. Workers therefore have no secrets, limited
memory and time, and no torch (transformers would import it). A worker that dies or is late is replaced, and its image
fails. Workers end with the thread that started them. Their answers are pure data: msgpack of the records below.
"""

import ctypes
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from octavo_engine.media.placeholders import MAX_PIXELS
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import InvalidRequest, OctavoError, StartupError, Unavailable, first_line
from octavo_engine.wire.records import ImageInput

if TYPE_CHECKING:
    from octavo_engine.media.processor import ImageProcessor

#: The arrays that the vision tower takes for an image, such as its pixels, under transformers' names.
Arrays = dict[str, npt.NDArray[Any]]

DType = Literal["bool", "uint8", "int32", "int64", "float32", "float64"]

TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1
_RETRY_S = 1.0
_START_TIMEOUT_S = 300.0  # it may read its packages from a slow disk
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
#: Variables without which Python may not find its packages.
_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH")


class WorkerStart(msgspec.Struct):
    """`folder`: the folder with the image processor's settings. `kwargs`: settings that replace some of them. `config`:
    the model's config, overrides included. `max_pixels`: most pixels of an image."""

    folder: str
    config: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}
    max_pixels: int = MAX_PIXELS
    memory_bytes: int = 2 << 30


class Normalisation(msgspec.Struct, tag=True):
    """Pixels are bytes; `(pixels * rescale_factor - mean) / std`, by channel, normalises them."""

    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Image(msgspec.Struct):
    """`data`, `kwargs`: as of `ImageInput`."""

    data: bytes
    kwargs: str = ""


class Array(msgspec.Struct):
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


class Processed(msgspec.Struct, tag=True):
    arrays: dict[str, Array]


class Refused(msgspec.Struct, tag=True):
    """The image cannot be processed, or the processor cannot be made. `reason`: for the user."""

    reason: str


Answer = Normalisation | Processed | Refused

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(WorkerStart).decode
decode_image = msgspec.msgpack.Decoder(Image).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class MediaWorkers:
    """`size` workers; each processes one image at a time. `timeout_s`: limit for an image, not for a worker's start.

    Raises StartupError if the first one cannot start.
    """

    def __init__(self, start: WorkerStart, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self._workers = [MediaWorker(start, timeout_s) for _ in range(size)]
        self._idle: queue.SimpleQueue[MediaWorker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="media")  # one of them starts each worker
        starts = [self._threads.submit(self._start, worker) for worker in self._workers]
        try:
            self.normalisation = starts[0].result()
        except (OctavoError, OSError) as error:
            self.shutdown()
            raise StartupError(str(error)) from error

    def process(self, image: ImageInput) -> "Future[Arrays]":
        """Process an image. The future raises InvalidRequest for a bad image, and Unavailable."""
        return self._threads.submit(self._process, encode(Image(image.data, image.kwargs)))

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, worker: "MediaWorker") -> Normalisation:
        try:
            return worker.start()
        finally:
            self._idle.put(worker)

    def _process(self, message: bytes) -> Arrays:
        worker = self._idle.get()
        try:
            return worker.process(message)
        finally:
            self._idle.put(worker)


class MediaWorker:
    """A worker process; another one replaces it if it ends. One thread at a time calls `start` and `process`."""

    def __init__(self, start: WorkerStart, timeout_s: float = TIMEOUT_S) -> None:
        self._start, self._timeout_s = start, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_late = self._is_stopped = False

    def start(self) -> Normalisation:
        """Start the process. Raises Unavailable, also if the image processor cannot be made."""
        if self._is_stopped:
            raise Unavailable("the engine ends.", retry_after_s=_RETRY_S)
        self._connection, other = Pipe()
        with other:
            self._child = subprocess.Popen(
                (sys.executable, "-P", "-m", "octavo_engine.media.worker", str(other.fileno())),
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT | {name: os.environ[name] for name in _KEPT if name in os.environ},
            )
        answer = self._exchange(self._child, self._connection, encode(self._start), _START_TIMEOUT_S)
        if isinstance(answer, Normalisation):
            return answer
        reason = answer.reason if isinstance(answer, Refused) else "a process that decodes images cannot start."
        raise Unavailable(reason, retry_after_s=_RETRY_S)

    def process(self, message: bytes) -> Arrays:
        """Process an encoded `Image`. Raises InvalidRequest if it is refused, takes too long or crashes the process.

        Raises Unavailable, too.
        """
        if self._child is None or self._child.poll() is not None:
            self.start()
        assert self._child is not None
        assert self._connection is not None
        answer = self._exchange(self._child, self._connection, message, self._timeout_s)
        if isinstance(answer, Processed):
            with suppress(ValueError):
                return {name: _to_numpy(array) for name, array in answer.arrays.items()}
        if isinstance(answer, Refused):
            raise InvalidRequest(answer.reason)
        if self._is_late:
            raise InvalidRequest(f"decoding took longer than {self._timeout_s:g} s: send a smaller image.")
        self._child.kill()  # it may have sent another answer
        code = self._child.wait()
        if code in (-signal.SIGKILL, 0):  # killed by the kernel for lack of memory, or by an administrator
            killed = "the process that decoded it was killed: send the request again."
            raise Unavailable(killed, retry_after_s=_RETRY_S)
        raise InvalidRequest(f"its decoder crashed (exit code {code}): send another image.")

    def stop(self) -> None:
        """End the process for good, from any thread."""
        self._is_stopped = True
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _exchange(
        self, child: "subprocess.Popen[bytes]", connection: Connection, message: bytes, timeout_s: float
    ) -> Answer | None:
        """Return the answer to a message. If the process has died, is late or sends an invalid answer, end it and
        return None."""
        self._is_late = False
        timer = threading.Timer(timeout_s, self._end_late, [child])
        timer.daemon = True
        timer.start()
        try:
            connection.send_bytes(message)
            answer: Answer = decode_answer(connection.recv_bytes(self._start.memory_bytes))
            return answer
        except (EOFError, OSError, RecursionError, msgspec.MsgspecError):
            child.kill()
            child.wait()
            connection.close()
            return None
        finally:
            timer.cancel()

    def _end_late(self, child: "subprocess.Popen[bytes]") -> None:
        self._is_late = True
        child.kill()


def _to_numpy(array: Array) -> npt.NDArray[Any]:
    """Raises ValueError for a shape that does not fit the data."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def main(connection: Connection) -> None:
    """Answer messages until the other end closes the connection. Like the engine core, ignore the usual signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    start = decode_start(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (start.memory_bytes, start.memory_bytes))
    sys.modules["torch"] = None  # type: ignore[assignment]
    from octavo_engine.media.processor import load_processor

    files = ModelFiles(name=start.folder, root=Path(start.folder), load_format="", config=start.config)
    try:
        processor = load_processor(files, start.kwargs, start.max_pixels)
    except StartupError as error:
        return connection.send_bytes(encode(Refused(str(error))))
    assert processor is not None, "the engine has read the settings of the processor"
    connection.send_bytes(encode(Normalisation(processor.rescale_factor, processor.mean, processor.std)))
    while True:
        connection.send_bytes(encode(_answer(processor, decode_image(connection.recv_bytes()))))


def _answer(processor: "ImageProcessor", image: Image) -> Answer:
    try:
        arrays = _process(processor, image)
        return Processed({name: _from_numpy(array) for name, array in arrays.items()})
    except (InvalidRequest, MemoryError) as error:
        if not isinstance(error.__cause__ or error, MemoryError):
            return Refused(str(error))
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return Refused(f"decoding needs more than {limit >> 20} MiB of memory: send a smaller image.")


def _process(processor: "ImageProcessor", image: Image) -> Arrays:
    try:
        return processor.process(image.data, "it", image.kwargs)
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:
        raise InvalidRequest(f"it cannot be scaled for the model: {first_line(error):.200}: send another.") from error


def _from_numpy(array: npt.NDArray[Any]) -> Array:
    return Array(cast(DType, str(array.dtype)), array.shape, memoryview(array.tobytes()))


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(int(sys.argv[1])) as pipe:
        main(pipe)
