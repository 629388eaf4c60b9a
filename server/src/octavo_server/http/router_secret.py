"""The secret that a router shares with its replicas: who shows it is believed what it says of its clients.

A request with the secret needs no API key, may read the KV stream, and is the tenant's whom it names. Without a secret
set, these headers say nothing; with one set, a wrong one is refused, as a router whose tenants aren't believed would
mix their caches. Several secrets are valid at once, so that one can be replaced while both sides run: files are read
again when they change, what is accepted (`router_secrets`) like what is sent (`OutgoingSecret`).
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import unnamed_tenant
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_server.api_keys import ApiKeys, FileWatch
from octavo_server.http.auth import ADMIN_PREFIXES, path_of
from octavo_server.json_responses import error_reply
from octavo_server.openai.errors import Unauthorized

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-octavo-secret"
TENANT_HEADER = "x-octavo-tenant"
#: Of the admin's routes, the only ones that a router has to do with.
ROUTER_PREFIX = "/kv"
WRONG = f"The {SECRET_HEADER} header is wrong: give router and replica the same --router-secret, or leave it out."


class RouterSecretMiddleware:
    """A pure ASGI layer before `BearerAuth`, which lets in what this one has marked with `is_router`."""

    def __init__(self, app: ASGIApp, secrets: ApiKeys) -> None:
        self._app = app
        self._secrets = secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._note_router(scope):
            await error_reply(Unauthorized(WRONG))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _note_router(self, scope: Scope) -> bool:
        """False for a secret that is wrong."""
        headers = Headers(scope=scope)
        secret = headers.get(SECRET_HEADER)
        if secret is None:
            return True
        if self._secrets.tenant_of(secret.encode("latin-1")) is None:
            return False
        path = path_of(scope)
        if path.startswith(ROUTER_PREFIX) or not path.startswith(ADMIN_PREFIXES):
            scope.setdefault("state", {}).update(is_router=True, tenant=headers.get(TENANT_HEADER, ""))
        return True


class OutgoingSecret:
    """Of several the first is sent; replicas accept all of theirs. Raises StartupError for a file that can't be used;
    once it works, a broken change is logged and passed over."""

    def __init__(
        self, given: tuple[str, ...] = (), path: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = FileWatch([] if given or path is None else [path], clock)
        self._current = given[0] if given else self._read()

    @property
    def current(self) -> str:
        """Empty without one."""
        if self._file.has_news():
            try:
                self._current = self._read()
            except StartupError as error:
                logger.error("the secret that replicas are sent stays as it was: %s", error)
            else:
                logger.info("read the secret that replicas are sent again")
        return self._current

    def _read(self) -> str:
        return next((secret for path in self._file.paths for secret in read_secrets(path).values()), "")


def read_secrets(path: Path) -> dict[str, str]:
    """Name -> secret: each line of a file, or each file of a folder. Raises StartupError without the content."""
    try:
        files = sorted(f for f in path.iterdir() if not f.name.startswith(".")) if path.is_dir() else [path]
        lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the router's secret from {path}: {type(error).__name__}.") from None
    secrets = {unnamed_tenant(line): line for line in lines if line}
    if not secrets:
        raise StartupError(f"{path} holds no secret: write one in a line.")
    return secrets


def router_secrets(given: tuple[str, ...], path: Path | None) -> ApiKeys | None:
    """None where no secret is set. Raises StartupError."""
    if not given and path is None:
        return None
    return ApiKeys(given, [] if path is None else [path], read=read_secrets, what="router's secrets")
