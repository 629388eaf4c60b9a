"""Secrets by which operator, routers and engines authenticate. All derive from one key: the operator stores only it.

A secret is the HMAC-SHA256 (RFC 2104), under that key, of the service's namespace and name and of the secret's purpose.
"""

import base64
import hashlib
import hmac
import logging
import secrets
from http import HTTPStatus

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.desired.service_secrets import ServiceSecrets

logger = logging.getLogger(__name__)

KEY_BYTES = 32


def derive_secrets(operator_key: bytes, service: tuple[str, str]) -> ServiceSecrets:
    """Derive the secrets of a service and its router. `service`: its namespace and name."""
    name = "/".join(service)  # names have no slash, so no two messages are equal
    texts = (name, f"{name}/admin", f"{name}/group")
    return ServiceSecrets(*(hmac.new(operator_key, text.encode(), hashlib.sha256).hexdigest() for text in texts))


async def operator_key(cluster: Cluster, *, namespace: str, name: str) -> bytes:
    """Read the key from the Secret of this name; create the Secret with a random key if it is missing."""
    if (key := await _find_key(cluster, namespace, name)) is not None:
        return key
    await _write_key(cluster, secrets.token_hex(KEY_BYTES).encode(), namespace, name)
    return await _read_key(cluster, namespace, name)


async def restore_key(cluster: Cluster, key: bytes, *, namespace: str, name: str) -> None:
    """Create the Secret again with the key in use if it was deleted; log a warning if it was changed. Never raises
    ApiError."""
    try:
        live = await _find_key(cluster, namespace, name)
        if live is None:
            logger.warning("the Secret %s/%s was deleted: it is created again with the same key", namespace, name)
            await _write_key(cluster, key, namespace, name)
        elif live != key:
            logger.warning("the Secret %s/%s was changed, but the operator uses the old key: restore the old key, or "
                           "restart the operator and apply all services again", namespace, name)  # fmt: skip
    except ApiError as error:
        logger.warning("%s", error)


async def _write_key(cluster: Cluster, key: bytes, namespace: str, name: str) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "Opaque",
        "data": {"key": base64.b64encode(key).decode()},
    }
    await cluster.create(manifest)


async def _find_key(cluster: Cluster, namespace: str, name: str) -> bytes | None:
    try:
        return await _read_key(cluster, namespace, name)
    except ApiError as error:
        if not error.is_gone:
            raise
    return None


async def _read_key(cluster: Cluster, namespace: str, name: str) -> bytes:
    secret = await cluster.read("Secret", namespace, name)
    if not (key := base64.b64decode((secret.get("data") or {}).get("key", ""))):
        remedy = "restore the entry, or delete the Secret so that the operator creates a new key"
        what = f"the Secret {namespace}/{name} has no entry `key`: {remedy}"
        raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, "NoKey", what)
    return key
