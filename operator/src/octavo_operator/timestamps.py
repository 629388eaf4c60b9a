"""Times as Kubernetes writes them."""

from datetime import UTC, datetime
from typing import Literal


def now_text(precision: Literal["seconds", "microseconds"] = "seconds") -> str:
    """RFC 3339, in UTC: text that sorts by time. Leases and Events want microseconds."""
    return datetime.now(UTC).isoformat(timespec=precision).replace("+00:00", "Z")
