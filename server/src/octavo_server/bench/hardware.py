"""Hardware of a measurement in one line: processor, cores, memory."""

import os
import platform
from pathlib import Path
from urllib.parse import urlsplit

_GIB = 1 << 30


def hardware(server_url: str) -> str:
    """Describe this machine's hardware, as that of the client unless the server has a loopback address."""
    host = urlsplit(server_url).hostname or ""
    here = host in ("localhost", "::1") or host.startswith("127.")
    return f"{'' if here else 'server elsewhere; client on '}{_processor()}, {_memory_gib():.0f} GiB"


def _processor() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
