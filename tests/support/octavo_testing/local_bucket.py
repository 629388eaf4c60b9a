"""`LocalBucket`: a server with the read operations of S3, and the base of those of other object stores.

The real client finds it by AWS_ENDPOINT_URL. Requests must be signed (Signature Version 4) with `KEY_ID` and `KEY`;
unsigned ones are accepted if `is_public`.
"""

import hashlib
import hmac
import re
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from octavo_testing.file_server import FileServer, Handler, e_tag

BUCKET, REGION = "models", "us-east-1"
KEY_ID, KEY = "AKIAEXAMPLE", "the-secret-key"
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<day>\d+)/(?P<region>[^/]+)/s3/aws4_request, "
    r"SignedHeaders=(?P<headers>\S+), Signature=(?P<signature>\w+)"
)


class ObjectHandler(Handler):
    """Responds as object stores do, which differ in their authorization, their listings and a few words."""

    site: "ObjectServer"
    root = ""  # path before that of the bucket
    missing_bucket, missing_object, changed = "NoSuchBucket", "NoSuchKey", "PreconditionFailed"

    def answer(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).removeprefix(self.root).lstrip("/").partition("/")
        if refusal := self.refusal():
            self._send_error(*refusal)
        elif bucket != BUCKET:
            self._send_error(404, self.missing_bucket)
        elif not key:
            body = self.listing(parse_qs(url.query).get("prefix", [""])[0])
            self.send_whole(200, body.encode(), Content_Type="application/xml")
        elif key not in self.site.files:
            self._send_error(404, self.missing_object)
        elif self.headers.get("If-Match") not in (None, e_tag(self.site.files[key])):
            self._send_error(412, self.changed)
        else:
            if not self.site.has_ranges:
                del self.headers["Range"]
            self.send_file(self.site.files[key], Last_Modified="Sat, 21 Nov 2026 10:00:00 GMT")

    def refusal(self) -> tuple[int, str] | None:
        """Return the status and the error's code of a request that is not authorized."""
        raise NotImplementedError

    def listing(self, prefix: str) -> str:
        """Return the list of objects, in the form of S3, which Google Cloud Storage has too."""
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T10:00:00.000Z</LastModified>"
            f"<ETag>{escape(e_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
            for key, content in sorted(self.site.files.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"

    def _send_error(self, status: int, code: str) -> None:
        self.send_whole(status, f"<Error><Code>{code}</Code></Error>".encode(), Content_Type="application/xml")


class _BucketHandler(ObjectHandler):
    def refusal(self) -> tuple[int, str] | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None if self.site.is_public else (403, "AccessDenied")
        found = _SIGNED.fullmatch(given)
        if found is None or found["key"] != KEY_ID:
            return 403, "InvalidAccessKeyId"
        is_right = self._signature(found["day"], found["headers"]) == found["signature"]
        return None if is_right else (403, "SignatureDoesNotMatch")

    def _signature(self, day: str, headers: str) -> str:
        url = urlsplit(self.path)
        query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(parse_qsl(url.query)))
        canonical_headers = "".join(f"{name}:{self.headers[name].strip()}\n" for name in headers.split(";"))
        payload = self.headers["x-amz-content-sha256"]
        request = "\n".join((self.command, url.path, query, canonical_headers, headers, payload))
        scope = f"{day}/{REGION}/s3/aws4_request"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{digest}"
        key = f"AWS4{KEY}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.digest(key, text.encode(), "sha256").hex()


class ObjectServer(FileServer):
    def __init__(self) -> None:
        super().__init__()
        self.is_public, self.has_ranges = False, True

    def environment(self, address: str) -> dict[str, str]:
        """Return the environment that makes a client use the server."""
        raise NotImplementedError


class LocalBucket(ObjectServer):
    handler_class = _BucketHandler

    def environment(self, address: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_REGION": REGION,
        }
