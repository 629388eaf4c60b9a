"""`CorsPolicy`: the web pages that may read responses (CORS). One rule for both servers.

No page may read responses unless --allowed-origins names the page's origin, as in vLLM: otherwise any page that a
developer visits could use the server on the developer's machine.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.settings.arg_types import json_list
from octavo_engine.settings.declare import Declared, setting

if TYPE_CHECKING:
    from starlette.types import ASGIApp

ALLOW_ORIGIN = b"access-control-allow-origin"
ALLOW_CREDENTIALS = (b"access-control-allow-credentials", b"true")
#: Response headers that allowed pages can read beside those that browsers show.
EXPOSED = (
    *("x-request-id", "retry-after"),
    *(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
)
EXPOSE_HEADERS = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsPolicy(Declared):
    allowed_origins: tuple[str, ...] = setting(
        tuple,
        'Origins of web pages that may read responses (CORS), as a JSON list; ["*"]: all origins.',
        group="server",
        parse=json_list,
    )
    allowed_methods: tuple[str, ...] = setting(
        ("*",), "Methods of requests from allowed origins, as a JSON list.", parse=json_list, unset="all"
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "Headers of requests from allowed origins, as a JSON list.", parse=json_list, unset="all"
    )
    allow_credentials: bool = setting(False, "Permission for allowed origins to send cookies.")

    def response_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or not self.allowed_origins:
            return []
        credentials = [ALLOW_CREDENTIALS] if self.allow_credentials else []
        if ANY in self.allowed_origins and not credentials:
            return [(ALLOW_ORIGIN, b"*"), EXPOSE_HEADERS]
        vary = (b"vary", b"origin")
        if ANY in self.allowed_origins or origin.decode("latin-1") in self.allowed_origins:
            return [(ALLOW_ORIGIN, origin), EXPOSE_HEADERS, *credentials, vary]
        return [vary]

    def is_foreign(self, origin: bytes | None, host: bytes | None) -> bool:
        """True for a request by a page of another origin that isn't allowed."""
        if origin is None or ANY in self.allowed_origins or origin.decode("latin-1") in self.allowed_origins:
            return False
        return origin.partition(b"://")[2] != host

    def wrap_app(self, app: "ASGIApp") -> "ASGIApp":
        """Wrap `app` so that browsers' preflight requests are answered and responses get CORS headers."""
        if not self.allowed_origins:
            return app
        from starlette.middleware.cors import CORSMiddleware

        return CORSMiddleware(
            app,
            allow_origins=self.allowed_origins,
            allow_methods=self.allowed_methods,
            allow_headers=self.allowed_headers,
            allow_credentials=self.allow_credentials,
            expose_headers=EXPOSED,
        )
