"""Filters uvicorn's access log: requests of probes and scrapers, which are frequent, are not logged."""

import logging

from octavo_server.http_metrics import UNCOUNTED

PATH_ARG = 2  # index in uvicorn's arguments: client, method, path with query, version, status


def is_logged(record: logging.LogRecord) -> bool:
    args = record.args
    return not isinstance(args, tuple) or str(args[PATH_ARG]).partition("?")[0] not in UNCOUNTED


def skip_probes() -> None:
    """Install the filter for the whole process, as uvicorn's logger is global."""
    logging.getLogger("uvicorn.access").addFilter(is_logged)
