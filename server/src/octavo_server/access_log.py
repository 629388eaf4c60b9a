"""Lines about requests: uvicorn's access log, and an engine server's logs of usage and outputs.

Requests of probes and scrapers, which are frequent, have no line in the access log. With `--log-format json`, its lines
have the fields tenant, code and, in a router, replica.
"""

import errno
import logging
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from octavo_engine.wire.errors import StartupError

from octavo_server.http.api_keys import tenant_label
from octavo_server.http.request_threads import TENANT
from octavo_server.http_metrics import UNCOUNTED

if TYPE_CHECKING:
    from octavo_engine.frontend.outputs import RequestOutput

    from octavo_server.request_metrics import RequestUsage

logger = logging.getLogger(__name__)

PATH_ARG, STATUS_ARG = 2, 4  # indices in uvicorn's arguments: client, method, path with query, version, status
STDOUT = "-"
#: Replica of the request that the current task serves.
REPLICA: ContextVar[str] = ContextVar("replica", default="")


class AccessLogFilter(logging.Filter):
    """`unlogged`: further paths without a log line."""

    def __init__(self, unlogged: Iterable[str] = ()) -> None:
        super().__init__()
        self._unlogged = frozenset(UNCOUNTED).union(unlogged)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if not isinstance(args, tuple):
            return True
        replica = {"replica": REPLICA.get()} if REPLICA.get() else {}
        record.fields = {"tenant": tenant_label(TENANT.get()), "code": args[STATUS_ARG], **replica}
        return str(args[PATH_ARG]).partition("?")[0] not in self._unlogged


def skip_probes(unlogged: Iterable[str] = ()) -> None:
    """Install the filter for the whole process, as uvicorn's logger is global. It replaces an earlier one."""
    access = logging.getLogger("uvicorn.access")
    for earlier in [f for f in access.filters if isinstance(f, AccessLogFilter)]:
        access.removeFilter(earlier)
    access.addFilter(AccessLogFilter(unlogged))


class UsageLog:
    """Writes a line of JSON for each request that has ended. If one can't be written, only the log ends.

    `path`: a file, which may have lines of other processes, or "-" for the standard output. Raises StartupError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = 1
        if path != STDOUT:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            try:
                self._file = os.open(path, flags, 0o640)
                if stat.S_ISFIFO(os.fstat(self._file).st_mode):
                    self.close()
                    raise OSError(errno.EINVAL, "a pipe, whose reader could stop the server")
            except OSError as error:
                raise StartupError(f"--usage-log {path}: {error.strerror}: name a file that can be written.") from None

    def close(self) -> None:
        if self._file is not None and self._path != STDOUT:
            os.close(self._file)
        self._file = None

    def write(self, usage: "RequestUsage") -> None:
        """Write the line at once and whole, so that lines of several processes don't mix."""
        if self._file is None:
            return
        now, first_s = time.monotonic(), usage.first_output_s
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": usage.request_id,
            "tenant": tenant_label(usage.tenant),
            "model": usage.model,
            "path": usage.path,
            "prompt_tokens": usage.num_prompt_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "completion_tokens": usage.num_generated,
            "ttft_s": None if first_s is None else round(first_s - usage.arrival_s, 4),
            "duration_s": round(now - usage.arrival_s, 4),
            "finish": usage.finish,
        }
        line = msgspec.json.encode(fields) + b"\n"
        try:
            reason = None if os.write(self._file, line) == len(line) else "the disk is full"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            self.close()
            logger.error("--usage-log %s ends here: %s. Remove the cause and restart the server.", self._path, reason)


class OutputLog:
    """Logs the text of each sequence of a request when the sequence ends (`--enable-log-outputs`).

    `max_chars`: most characters of a text in the log. None: no limit.
    """

    def __init__(self, request_id: str, max_chars: int | None) -> None:
        self._request_id = request_id
        self._max_chars = max_chars
        self._parts: defaultdict[tuple[int, int], list[str]] = defaultdict(list)

    def add(self, prompt_idx: int, output: "RequestOutput") -> None:
        """Add a delta of one prompt."""
        for sequence in output.outputs:
            key = prompt_idx, sequence.index
            self._parts[key].append(sequence.text)
            if sequence.finish_reason is not None:
                text = "".join(self._parts.pop(key))[: self._max_chars]
                logger.info("request %s: output %r, finish reason %s", self._request_id, text, sequence.finish_reason)
