"""The secret that a router shares with its replicas.

A request with the secret needs no API key, may call every route, and belongs to the tenant that it names (see
`http/access.py`). A server without a secret ignores these headers; a server with one refuses a wrong secret. Several
secrets may be valid at once, so that one can be replaced while both sides run: files are read again when they change,
for accepted secrets (`router_secrets`) and for the sent one (`OutgoingSecret`).
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import unnamed_tenant

from octavo_server.http.api_keys import ApiKeys, FileWatch, read_watched, reason_unread

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-octavo-secret"
TENANT_HEADER = "x-octavo-tenant"
WEIGHT_HEADER = "x-octavo-weight"  # of the tenant
MAX_TOKENS_HEADER = "x-octavo-max-tokens"  # limit of each output


class OutgoingSecret:
    """The secret that a router sends: the first of several, as replicas accept any of theirs. Raises StartupError for
    an unusable file; if a later change makes the file unusable, that is logged and the secret stays.
    """

    def __init__(
        self, given: tuple[str, ...] = (), path: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = FileWatch([] if given or path is None else [path], clock)
        self._current = given[0] if given else self._read()

    @property
    def current(self) -> str:
        if self._file.has_changed():
            try:
                self._current = self._read()
            except StartupError as error:
                logger.error("the router secret sent to replicas stays unchanged: %s", error)
            else:
                logger.info("reloaded the router secret sent to replicas")
        return self._current

    def _read(self) -> str:
        return next((secret for path in self._file.paths for secret in read_secrets(path).values()), "")


def read_secrets(path: Path) -> dict[str, str]:
    """Name -> secret, for each line of a file or of a folder's files. Raises StartupError, never with the content."""
    try:
        files = sorted(f for f in path.iterdir() if not f.name.startswith(".")) if path.is_dir() else [path]
        lines = [line.strip() for file in files for line in read_watched(file).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the router's secret from {path}: {reason_unread(error)}.") from None
    secrets = {unnamed_tenant(line): line for line in lines if line}
    if not secrets:
        raise StartupError(f"{path} holds no secret: write each secret in a line of its own.")
    return secrets


def router_secrets(given: tuple[str, ...], path: Path | None) -> ApiKeys | None:
    """Secrets that a server accepts; None if no secret is set. Raises StartupError."""
    if not given and path is None:
        return None
    return ApiKeys(given, [] if path is None else [path], read=read_secrets, kind="router's secrets")
