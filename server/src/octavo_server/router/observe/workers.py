"""`Workers`: the processes of one router (`--workers N`) collect reports from each other, so that each can serve
`/metrics`, `/debug` and `/state/events` for all.

Each worker listens on a Unix socket in a folder that only the workers can enter. Query and report are msgpack, each
after its length; a connection carries one query. For a worker that doesn't answer in time, its latest report counts: it
may hang and still have requests in flight. A worker whose socket refuses connections counts as gone.
"""

import asyncio
import logging
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo_server.router.observe.report import Report, Reporter, ReportQuery, merged_state
from octavo_server.router.observe.state import RouterState
from octavo_server.supervise import cancel_tasks

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
_MAX_QUERY_BYTES = 128 * 1024  # more than the head of the HTTP request from which a query is built
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_query_decoder = msgspec.msgpack.Decoder(ReportQuery)
_report_decoder = msgspec.msgpack.Decoder(Report)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers' shared mark that the router drains: a file in `folder`, which is None for a router of one worker."""

    folder: Path | None = None
    number: int = 0

    def drain(self) -> None:
        if self.folder is not None:
            self._mark.touch()

    def resume(self) -> None:
        if self.folder is not None:
            self._mark.unlink(missing_ok=True)

    @property
    def is_draining(self) -> bool | None:
        """True while any worker drains. None for a router of one worker."""
        return None if self.folder is None else self._mark.exists()

    @property
    def _mark(self) -> Path:
        assert self.folder is not None
        return self.folder / "draining"


class Workers:
    """`folder`: holds the workers' sockets; None for a router of one worker. `on_notify` is called when another worker
    announces a change of its state.
    """

    def __init__(self, reporter: Reporter, folder: Path | None = None, number: int = 0) -> None:
        self._reporter = reporter
        self._folder = folder
        self._own = None if folder is None else folder / f"worker-{number}.sock"
        self._server: asyncio.Server | None = None
        self._known: dict[tuple[Path, str], Report] = {}
        self._must_notify = False
        self._notifying: asyncio.Task[None] | None = None
        self.on_notify: Callable[[], None] = lambda: None

    async def start(self) -> None:
        if self._own is not None:
            self._own.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self._own)

    async def stop(self) -> None:
        if self._notifying is not None:
            await cancel_tasks([self._notifying])
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            assert self._own is not None
            self._own.unlink(missing_ok=True)

    async def collect_reports(self, query: ReportQuery) -> list[Report]:
        return [self._reporter.report(query), *await self._query_others(query)]

    def notify_others(self) -> None:
        """Make the other workers call their `on_notify`, as this worker's state changed. Changes during a notice share
        the next one."""
        self._must_notify = self._folder is not None
        if self._must_notify and (self._notifying is None or self._notifying.done()):
            self._notifying = asyncio.create_task(self._notify_others())

    async def _notify_others(self) -> None:
        while self._must_notify:
            self._must_notify = False
            await self._query_others(ReportQuery("notify"))

    async def _query_others(self, query: ReportQuery) -> list[Report]:
        others = (
            [path for path in sorted(self._folder.glob("worker-*.sock")) if path != self._own] if self._folder else []
        )
        answers = await asyncio.gather(*(self._query_other(path, query) for path in others))
        return [answer for answer in answers if answer is not None]

    async def state(self) -> RouterState:
        return merged_state(await self.collect_reports(ReportQuery("state")))

    async def _query_other(self, path: Path, query: ReportQuery) -> Report | None:
        key = path, query.what
        try:
            async with asyncio.timeout(ANSWER_S):
                report = _report_decoder.decode(await _exchange(path, _encode(query)))
        except TimeoutError:
            logger.warning("the router's %s didn't answer within %g s; its latest report is used", path.stem, ANSWER_S)
            return self._known.get(key)
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError):
            self._known.pop(key, None)
            return None
        self._known[key] = report
        return report

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, msgspec.MsgspecError):
            async with asyncio.timeout(ANSWER_S):
                query = _query_decoder.decode(await _read(reader, _MAX_QUERY_BYTES))
                if query.what == "notify":
                    self.on_notify()
                _write(writer, _encode(self._reporter.report(query)))
                await writer.drain()
        writer.close()


async def _exchange(path: Path, query: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        _write(writer, query)
        return await _read(reader)
    finally:
        writer.close()


def _write(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(_LENGTH.pack(len(body)) + body)


async def _read(reader: asyncio.StreamReader, max_bytes: int = 2**32) -> bytes:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > max_bytes:
        raise OSError(f"a message of {size} bytes exceeds the limit of {max_bytes}")
    return await reader.readexactly(size)
