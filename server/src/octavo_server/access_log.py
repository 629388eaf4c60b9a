"""uvicorn's line for each HTTP request, without those that probes and scrapers would fill a log with."""

import logging

from octavo_server.http_metrics import UNCOUNTED

PATH_ARG = 2  # of uvicorn's arguments: client, method, path with query, version, status


def is_logged(record: logging.LogRecord) -> bool:
    args = record.args
    return not isinstance(args, tuple) or str(args[PATH_ARG]).partition("?")[0] not in UNCOUNTED


def skip_probes() -> None:
    """For the process: uvicorn's logger is a global one."""
    logging.getLogger("uvicorn.access").addFilter(is_logged)
