"""Shows the progress of a download: a bar on a terminal, otherwise a log line every 10 s.

Progress is measured by the sizes of the files in the folder, so it works with every client library. A read fails if its
source sends no byte for `STALL_S` seconds; the reading thread may still hang.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

#: Called with the number of bytes that were read or downloaded since the last call.
Advance = Callable[[int], None]
Result = TypeVar("Result")

STALL_S = 60.0
BAR_PERIOD_S, LOG_PERIOD_S = 0.2, 10.0
_KIB = 1024.0


class LoadEnded(Exception):
    """The load that needs the bytes has ended. An `Advance` raises this on the thread that reads."""


def ignore_progress(num_bytes: int) -> None:
    """Do nothing: the `Advance` of reads without a deadline."""


class TimedRead:
    """The progress of a read that may stall. The thread that reads calls `advance`."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_ended = False
        self._name, self._clock = name, clock
        self._advanced_s, self._num_bytes = clock(), 0

    def advance(self, num_bytes: int) -> None:
        """Record bytes that were read. Raises LoadEnded if the read has ended."""
        if self.is_ended:
            raise LoadEnded
        if num_bytes > 0:
            self._num_bytes += num_bytes
            self._advanced_s = self._clock()

    @property
    def stalls_at_s(self) -> float:
        return self._advanced_s + STALL_S

    def stall_text(self) -> str:
        return (
            f"{self._name}: its source gave no byte for {STALL_S:g} s, after {size_text(self._num_bytes)}: check the "
            "volume, the network or the server that it is on"
        )


def read_on_thread(read: Callable[[], Result]) -> "Future[Result]":
    """Read on a thread of its own, which may hang: no exit waits for it."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(read())
        except Exception as error:
            logger.debug("a read has failed", exc_info=True)
            future.set_exception(error)

    threading.Thread(target=run, name="read", daemon=True).start()
    return future


@contextmanager
def show_progress(
    name: str,
    folder: Path,
    total_bytes: int,
    *,
    period_s: float = LOG_PERIOD_S,
    has_bar: bool | None = None,
    advance: Advance = ignore_progress,
) -> Iterator[None]:
    """Show the progress of a download of `total_bytes` into `folder` until the context ends.

    `advance` is called on another thread.
    """
    before = folder_bytes(folder)

    reached = before

    def done() -> int:
        nonlocal reached
        size = folder_bytes(folder)
        with suppress(LoadEnded):
            advance(abs(size - reached))
        reached = size
        return min(total_bytes, max(0, size - before))

    show = _bar if (sys.stderr.isatty() if has_bar is None else has_bar) else _lines
    over = threading.Event()
    thread = threading.Thread(
        target=show, args=(name, total_bytes, done, over, period_s), name="fetch-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lines(name: str, total: int, done: Callable[[], int], over: threading.Event, period_s: float) -> None:
    reached = 0
    while not over.wait(period_s):
        now = done()
        pace = (now - reached) / period_s
        left = f", {(total - now) / pace:.0f} s left" if pace else ""
        share = f"{100 * now / total:.0f} %" if total else "all"
        logger.info("%s: %s of %s (%s), %s/s%s", name, size_text(now), size_text(total), share, size_text(pace), left)
        reached = now


def _bar(name: str, total: int, done: Callable[[], int], over: threading.Event, _: float) -> None:
    from tqdm import tqdm

    with tqdm(desc=name, total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        while not over.wait(BAR_PERIOD_S):
            bar.update(done() - bar.n)
        bar.update(done() - bar.n)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; files that vanish meanwhile are not counted."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 (called often)
            except FileNotFoundError:
                continue
    return total


def size_text(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < _KIB or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.2f} {unit}"
        num_bytes /= _KIB
    raise AssertionError("the last unit takes any size")
