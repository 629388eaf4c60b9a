"""Who may see what a router does with other people's requests: whoever has the operator's key, or the shared secret.

Of several API keys that is the one named "admin"; a single key is the operator's own. Without keys and without a secret
everybody may: then whoever reaches the router may send requests, too.
"""

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from octavo_server.api_keys import ApiKeys
from octavo_server.http.auth import ADMIN
from octavo_server.http.router_secret import SECRET_HEADER
from octavo_server.openai.errors import Forbidden, Unauthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAuth:
    keys: ApiKeys | None = None
    secrets: ApiKeys | None = None

    def check(self, scope: Scope) -> None:
        """Raises Unauthorized or Forbidden."""
        if self.keys is None and self.secrets is None:
            return
        headers = Headers(scope=scope)
        if _name(self.secrets, headers.get(SECRET_HEADER, "")) is not None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        name = _name(self.keys, key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise Unauthorized(
                "This route is the operator's: send 'Authorization: Bearer KEY', or the router's secret in the header "
                f"{SECRET_HEADER}."
            )
        if self.keys is not None and len(self.keys) > 1 and name != ADMIN:
            raise Forbidden(
                f"This route is the operator's: of several API keys, only the one named {ADMIN!r} may use it."
            )


def _name(ring: ApiKeys | None, given: str) -> str | None:
    return None if ring is None or not given else ring.tenant_of(given.encode("latin-1"))
