"""The format of log lines in the server and in the engine core's process: text for people, JSON for log collectors.

Lines about a request contain its id, which the request's handler sets in `REQUEST_ID`. Control characters are written
as escapes, so that client input cannot split a line or control a terminal; lines of a traceback are indented.
"""

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from octavo_engine.settings.vllm import LOGGING_LEVEL

LogFormat = Literal["text", "json"]
LOGGING_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x09} | {0x0A: "\\n"}


class TextFormatter(logging.Formatter):
    """`process`: a name that is put before each message; empty for the server itself."""

    def __init__(self, process: str = "") -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._source = f"{process}: " if process else ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = REQUEST_ID.get()
        about = f"[{request_id}] " if request_id else ""
        text = f"{about}{record.message}".translate(_ESCAPES)
        return f"{self.formatTime(record, self.datefmt)} {record.levelname:7} {self._source}{text}"

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))

    def usesTime(self) -> bool:  # noqa: N802
        return False


def _indented(text: str) -> str:
    return "\n".join(f"  {line.translate(_ESCAPES)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, process, message; request_id and exception, if any.

    A record's attribute `fields` has further ones.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def current_format() -> LogFormat:
    """Return the format that `configure_logging` has set; text without it."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"


def configure_logging(log_format: LogFormat, *, process: str) -> None:
    """Log this process's lines to standard error. Replaces any earlier configuration.

    `process`: "api", "router", "core" or, of a model with several ranks, "rank 1".

    `$VLLM_LOGGING_LEVEL` is the least level of Octavo's own lines; an unknown level counts as INFO.
    """
    shown = "" if process in ("api", "router") else process
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(shown))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    level = os.environ.get(LOGGING_LEVEL, "").upper()
    for package in ("octavo", "octavo_engine", "octavo_server"):
        logging.getLogger(package).setLevel(level if level in LOGGING_LEVELS else "INFO")
