"""Timestamps in the format of Kubernetes."""

from datetime import UTC, datetime
from typing import Literal


def now_text(precision: Literal["seconds", "microseconds"] = "seconds") -> str:
    """The current time in UTC as RFC 3339 text, which sorts by time. Leases and Events need microseconds."""
    return datetime.now(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def seconds_since(then: str, now: str) -> float:
    """Seconds between two such times."""
    return (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds()
