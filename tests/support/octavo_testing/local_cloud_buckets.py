"""`LocalGCSBucket` and `LocalContainer`: servers with the read operations of Google Cloud Storage and of Azure Blobs.

Requests must carry a token that the service account's key signed (RFC 7515) or Azure's Shared Key signature; anonymous
ones are accepted if `is_public`.
"""

import base64
import hashlib
import hmac
import json
import subprocess
from functools import cache
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

from octavo_testing.file_server import e_tag
from octavo_testing.local_bucket import BUCKET, ObjectHandler, ObjectServer

ACCOUNT, ACCOUNT_KEY = "octavotests", base64.b64encode(b"the-account-key").decode()
_SHA256_PREFIX = bytes.fromhex("3031300d060960864801650304020105000420")  # RFC 8017, 9.2: DigestInfo of SHA-256


class _GCSHandler(ObjectHandler):
    """The XML API of https://cloud.google.com/storage/docs/xml-api/overview."""

    def refusal(self) -> tuple[int, str] | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None if self.site.is_public else (401, "AuthenticationRequired")
        signed, _, signature = given.removeprefix("Bearer ").rpartition(".")
        return None if _is_signed(signed.encode(), _decode(signature)) else (403, "AccessDenied")


class LocalGCSBucket(ObjectServer):
    handler_class = _GCSHandler

    def environment(self, address: str) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": address, "GOOGLE_SERVICE_ACCOUNT_KEY": service_account_key()}


class _ContainerHandler(ObjectHandler):
    """The operations of https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api."""

    root = f"/{ACCOUNT}"
    missing_bucket, missing_object, changed = "ContainerNotFound", "BlobNotFound", "ConditionNotMet"

    def refusal(self) -> tuple[int, str] | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None if self.site.is_public else (401, "NoAuthenticationInformation")
        key = base64.b64decode(ACCOUNT_KEY)
        expected = base64.b64encode(hmac.digest(key, self._text_to_sign().encode(), "sha256")).decode()
        return None if given == f"SharedKey {ACCOUNT}:{expected}" else (403, "AuthenticationFailed")

    def _text_to_sign(self) -> str:
        names = ("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date")
        conditions = ("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range")
        values = [self.headers.get(name, "") for name in (*names, *conditions)]
        values[2] = "" if values[2] == "0" else values[2]
        own = sorted((n.lower(), v.strip()) for n, v in self.headers.items() if n.lower().startswith("x-ms-"))
        url = urlsplit(self.path)
        query = sorted((name.lower(), value) for name, value in parse_qsl(url.query))
        resource = [f"/{ACCOUNT}{url.path}", *(f"{name}:{value}" for name, value in query)]
        return "\n".join([self.command, *values, *(f"{name}:{value}" for name, value in own), *resource])

    def listing(self, prefix: str) -> str:
        rows = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>Sat, 21 Nov 2026 10:00:00 GMT</Last-Modified>"
            f"<Etag>{e_tag(content).strip(chr(34))}</Etag><Content-Length>{len(content)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key, content in sorted(self.site.files.items())
            if key.startswith(prefix)
        )
        return f"<EnumerationResults><Prefix>{escape(prefix)}</Prefix><Blobs>{rows}</Blobs></EnumerationResults>"


class LocalContainer(ObjectServer):
    handler_class = _ContainerHandler

    def environment(self, address: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }


@cache
def service_account_key() -> str:
    """Return the JSON of a new service account's key."""
    return json.dumps(
        {"private_key_id": "1", "private_key": _private_key(), "client_email": f"tests@{BUCKET}.iam", "token_uri": ""}
    )


@cache
def _private_key() -> str:
    return subprocess.run(["openssl", "genrsa", "2048"], capture_output=True, text=True, check=True).stdout


@cache
def _modulus() -> int:
    command = ["openssl", "rsa", "-modulus", "-noout"]
    done = subprocess.run(command, input=_private_key(), capture_output=True, text=True, check=True)
    return int(done.stdout.partition("=")[2], 16)


def _is_signed(text: bytes, signature: bytes) -> bool:
    """Return whether the service account's key signed the text (RS256: PKCS #1 v1.5 with SHA-256)."""
    num_bytes = (_modulus().bit_length() + 7) // 8
    content = _SHA256_PREFIX + hashlib.sha256(text).digest()
    padded = b"\x00\x01" + b"\xff" * (num_bytes - len(content) - 3) + b"\x00" + content
    return pow(int.from_bytes(signature), 65537, _modulus()).to_bytes(num_bytes) == padded


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
