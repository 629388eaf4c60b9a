"""Filters uvicorn's access log: requests of probes and scrapers, which are frequent, are not logged."""

import logging
from collections.abc import Iterable

from octavo_server.http_metrics import UNCOUNTED

PATH_ARG = 2  # index in uvicorn's arguments: client, method, path with query, version, status


class AccessLogFilter(logging.Filter):
    """`unlogged`: further paths without a log line."""

    def __init__(self, unlogged: Iterable[str] = ()) -> None:
        super().__init__()
        self._unlogged = frozenset(UNCOUNTED).union(unlogged)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        return not isinstance(args, tuple) or str(args[PATH_ARG]).partition("?")[0] not in self._unlogged


def skip_probes(unlogged: Iterable[str] = ()) -> None:
    """Install the filter for the whole process, as uvicorn's logger is global. It replaces an earlier one."""
    access = logging.getLogger("uvicorn.access")
    for earlier in [f for f in access.filters if isinstance(f, AccessLogFilter)]:
        access.removeFilter(earlier)
    access.addFilter(AccessLogFilter(unlogged))
