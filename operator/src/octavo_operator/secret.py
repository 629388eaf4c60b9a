"""Secrets that routers and engines know each other by: derived, so the operator, which needs them too, stores none.

HMAC-SHA256 (RFC 2104) of the router's place under the operator's own key.
"""

import hashlib
import hmac


def derived_secret(operator_key: bytes, namespace: str, router: str) -> str:
    return hmac.new(operator_key, f"{namespace}/{router}".encode(), hashlib.sha256).hexdigest()
