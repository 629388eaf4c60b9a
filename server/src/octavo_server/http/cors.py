"""`CorsPolicy`: which web pages may read answers (CORS). One rule for both servers.

A server without keys lets no page read, unless --allowed-origins names its origin: else any page that a developer
visits could use the server on that developer's machine. A server with keys lets every page read: pages need a key.
"""

from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo_server.config import HttpSettings

ALLOW_ORIGIN = b"access-control-allow-origin"
ANY = "*"


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    allowed_origins: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: HttpSettings) -> "CorsPolicy":
        if settings.allowed_origins is not None:
            return cls(settings.allowed_origins)
        return cls((ANY,) if settings.needs_key else ())

    def response_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What an answer says of the page that asked; `headers` are the request's."""
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or not self.allowed_origins:
            return []
        if ANY in self.allowed_origins:
            return [(ALLOW_ORIGIN, b"*")]
        vary = (b"vary", b"origin")
        return [(ALLOW_ORIGIN, origin), vary] if origin.decode("latin-1") in self.allowed_origins else [vary]

    def is_foreign(self, origin: bytes | None, host: bytes | None) -> bool:
        """Whether a page of another origin asks that isn't allowed to."""
        if origin is None or ANY in self.allowed_origins or origin.decode("latin-1") in self.allowed_origins:
            return False
        return origin.partition(b"://")[2] != host

    def add_middleware(self, app: ASGIApp) -> ASGIApp:
        """Around `app`: answers the preflight requests of browsers, and adds headers to answers."""
        if not self.allowed_origins:
            return app
        return CORSMiddleware(app, allow_origins=self.allowed_origins, allow_methods=[ANY], allow_headers=[ANY])
