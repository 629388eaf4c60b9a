"""`AllowedHosts`: the names under which a server without API keys may be called.

A web page can make its own name resolve to the address of a server that only the page's visitor reaches, and then call
that server as a page of the same origin (DNS rebinding). Its requests have the page's name in their Host header.
"""

import ipaddress
import socket
from collections.abc import Collection
from functools import lru_cache

ANY = "*"
LOCALHOST = "localhost"


class AllowedHosts:
    """IP addresses, `localhost`, the machine's own name, and `names`, where "*" stands for all."""

    def __init__(self, names: Collection[str]) -> None:
        self._allows_any = ANY in names
        self._names = {LOCALHOST, socket.gethostname().lower(), *(name.lower() for name in names)}

    def allows(self, host: bytes | None) -> bool:
        """`host`: the value of the Host header. None, which no browser sends, is allowed."""
        if host is None or self._allows_any:
            return True
        name = _without_port(host.decode("latin-1").lower())
        return name in self._names or name.endswith(f".{LOCALHOST}") or _is_address(name)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() and not name.endswith(":") else host


@lru_cache(maxsize=128)
def _is_address(name: str) -> bool:
    is_ipv6 = name.startswith("[") and name.endswith("]")
    try:
        return ipaddress.ip_address(name[1:-1] if is_ipv6 else name).version == (6 if is_ipv6 else 4)
    except ValueError:
        return False
