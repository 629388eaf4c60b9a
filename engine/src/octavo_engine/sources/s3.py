"""Downloads models from S3-compatible object stores: `s3://BUCKET/PREFIX` and `s3://BUCKET/PATH.gguf`.

Endpoint, region and credentials come from the variables of AWS' own tools (docs/guide/serving.md); profiles in
`~/.aws` provide static keys. Objects are requested by ETag, so that versions of a replaced object are never mixed.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.sources.aws_profile import profile_options
from octavo_engine.sources.download_dir import Snapshot
from octavo_engine.sources.file_selection import select_files
from octavo_engine.sources.retries import Interrupted, with_retries
from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

SCHEME = "s3://"
MAX_AT_ONCE = 8
CHUNK_BYTES = 2**19
DIGEST_CHARS = 12
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_ASKED = re.compile(r"Error performing \w+ (\w+://[^/?\s]+)")
_REASON = re.compile(r'(?:message: |failed to lookup address information: )"?([^"]+?)"')
_AGAIN = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    num_bytes: int
    e_tag: str | None


class S3Model:
    """A `ModelSource` in S3. Raises StartupError for a URI without a bucket, or if the S3 client is not installed."""

    def __init__(self, uri: str, *, load_format: str = "auto") -> None:
        bucket, _, path = uri.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise StartupError(f"{uri}: the bucket is missing: use s3://BUCKET/FOLDER or s3://BUCKET/PATH.gguf.")
        self.uri = uri
        self._load_format = load_format
        self._folder, self._file = _split(path)
        self._store = _store(uri, bucket)
        self._objects: dict[str, _Object] = {}

    def snapshot(self) -> Snapshot:
        self._objects = with_retries(self._list, self.uri)
        if not self._objects:
            raise StartupError(f"{self.uri}: no objects were found: check the names of the bucket and the folder.")
        wanted = select_files(self.uri, self._objects, load_format=self._load_format, file=self._file)
        found = {name: self._objects[name] for name in wanted.names}
        listing = "\n".join(f"{name} {o.num_bytes} {o.e_tag}" for name, o in sorted(found.items()))
        version = hashlib.sha256(listing.encode()).hexdigest()[:DIGEST_CHARS]
        sizes = {name: o.num_bytes for name, o in found.items()}
        return Snapshot(uri=self.uri, version=version, files=sizes, main=wanted.main)

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="fetch") as pool:
            tasks = [pool.submit(self._download_object, self._objects[name], staging / name) for name in files]
            try:
                for task in tasks:
                    task.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _list(self) -> dict[str, _Object]:
        import obstore

        found: dict[str, _Object] = {}
        with _translate_errors(self.uri):
            for page in obstore.list(self._store, self._folder or None):
                for meta in page:
                    name = meta["path"].removeprefix(self._folder).lstrip("/")
                    found[name] = _Object(meta["path"], meta["size"], meta["e_tag"])
        return found

    def _download_object(self, found: _Object, target: Path) -> None:
        partial = target.with_name(f"{target.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()

        def num_there() -> int:
            return partial.stat().st_size if partial.exists() else found.num_bytes

        with_retries(lambda: self._download(found, partial), f"s3: {found.key}", progress=num_there)
        with suppress(FileNotFoundError):  # on a volume without locks, another process may have renamed it already
            partial.replace(target)

    def _download(self, found: _Object, partial: Path) -> None:
        """Resume the download of one object. The file is never truncated: on a volume without locks, another process
        may write the same bytes to the same offsets.
        """
        offset = partial.stat().st_size
        if offset == found.num_bytes:
            return
        with _translate_errors(self.uri), partial.open("r+b") as file:
            chunks, offset = _opened(self._store, found, offset)
            file.seek(offset)
            for chunk in chunks:
                file.write(chunk)
        if partial.stat().st_size < found.num_bytes:
            raise Interrupted("the connection ended early")


def _opened(store: "S3Store", found: _Object, offset: int) -> tuple[Iterator[Any], int]:
    """Return the object's bytes from `offset` on, or from 0 if the server ignores a range, and where they start."""
    import obstore
    from obstore.exceptions import GenericError

    whole: GetOptions = {} if found.e_tag is None else {"if_match": found.e_tag}
    if offset:
        try:
            rest = obstore.get(store, found.key, options={**whole, "range": (offset, found.num_bytes)})
            return iter(rest.stream(CHUNK_BYTES)), offset
        except GenericError as error:
            if "non-partial" not in str(error):
                raise
    return iter(obstore.get(store, found.key, options=whole).stream(CHUNK_BYTES)), 0


def _split(path: str) -> tuple[str, str | None]:
    """Split a path into the folder and the requested GGUF file or glob in it, if any."""
    folder, _, last = path.strip("/").rpartition("/")
    if last.endswith(".gguf"):
        return folder, last
    return path.strip("/"), None


def _store(uri: str, bucket: str) -> "S3Store":
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise StartupError(f"{uri}: the S3 client is missing: install it by pip install 'octavo-engine[s3]'") from error
    options = profile_options(os.environ)
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), options.get("endpoint", ""))
    client: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=60),
        "timeout": timedelta(days=1),  # for one object
    }
    try:
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = Path(bundle).read_bytes()
        return S3Store(bucket, client_options=client, retry_config={"max_retries": 0}, **options)  # type: ignore[arg-type]
    except (BaseError, OSError, ValueError) as error:
        raise StartupError(f"{uri}: {_first_line(error)}") from error


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@contextmanager
def _translate_errors(uri: str) -> Iterator[None]:
    """Translate the client's errors: raise Interrupted if a retry may help, else StartupError."""
    from obstore.exceptions import BaseError, PreconditionError

    try:
        yield
    except PreconditionError as error:
        raise StartupError(f"{uri}: an object was replaced during the download: fetch the model again.") from error
    except (BaseError, FileNotFoundError) as error:
        text = str(error)
        found, code = _STATUS.search(text), _CODE.search(text)
        status = int(found[1]) if found else 404 if isinstance(error, FileNotFoundError) else None
        if _METADATA_SERVICE in text:
            raise StartupError(f"{uri}: no credentials. {_CREDENTIALS}") from error
        if status in (401, 403):
            raise StartupError(f"{uri}: access was denied ({code[1] if code else status}). {_CREDENTIALS}") from error
        if status == 404:
            raise StartupError(
                f"{uri}: the bucket or object does not exist: check its name and the endpoint."
            ) from error
        if status is None or status in _AGAIN:
            raise Interrupted(f"the server returned {status}" if status else _why_unreachable(text)) from error
        hint = " Check that AWS_REGION is the bucket's region." if status in (301, 307, 400) else ""
        raise StartupError(f"{uri}: the server returned {status} {code[1] if code else ''}.{hint}") from error


_METADATA_SERVICE = "169.254."
_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (on Kubernetes: a Secret with these entries in "
    "spec.model.secretRef), or AWS_SKIP_SIGNATURE=true for a public bucket."
)


def _why_unreachable(text: str) -> str:
    """Extract the address and the reason from the client's long message."""
    asked, reason, first = _ASKED.search(text), _REASON.findall(text), text.splitlines()[0]
    why = reason[-1] if reason else first.rpartition(" - ")[2].removeprefix("HTTP error: ")
    return f"{asked[1]} cannot be reached: {why}" if asked else why


def _first_line(error: Exception) -> str:
    """Return the first line of an error; the other lines are the client's internals."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
