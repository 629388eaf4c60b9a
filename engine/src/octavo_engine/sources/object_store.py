"""Downloads models from object stores: `s3://BUCKET/PREFIX`, `gs://BUCKET/PATH.gguf`, `az://CONTAINER/PREFIX`.

`object_store_kinds` lists the stores and makes their clients. Objects are requested by ETag, so that versions of a
replaced object are never mixed.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_engine.sources.download_dir import Snapshot
from octavo_engine.sources.file_selection import ADAPTER, select_files
from octavo_engine.sources.object_store_kinds import StoreKind, store_kind
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.sources.retries import Interrupted, with_retries
from octavo_engine.wire.errors import StartupError, first_line

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

MAX_AT_ONCE = 8
CHUNK_BYTES = 2**19
MIN_CHUNK_BYTES = 1  # each read returns the bytes that have arrived, so a slow source shows its progress
DIGEST_CHARS = 12
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_ASKED = re.compile(r"Error performing \w+ (\w+://[^/?\s]+)")
_REASON = re.compile(r'(?:message: |failed to lookup address information: )"?([^"]+?)"')
_METADATA_SERVICES = ("169.254.", "metadata.google.internal")
_AGAIN = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    num_bytes: int
    e_tag: str | None


class ObjectStoreModel:
    """A `ModelSource` in an object store. Raises StartupError for a URI without a bucket, or without an account."""

    def __init__(
        self, uri: str, kind: StoreKind, *, load_format: str = "auto", advance: Advance = ignore_progress
    ) -> None:
        scheme, _, place = uri.partition("://")
        bucket, _, path = place.partition("/")
        if not bucket:
            form = f"{scheme}://{kind.bucket.upper()}"
            raise StartupError(f"{uri}: the {kind.bucket} is missing: use {form}/FOLDER or {form}/PATH.gguf.")
        self.uri = uri
        self._kind, self._load_format, self._advance = kind, load_format, advance
        self._folder, self._file = _split(path)
        self._store = kind.connect(uri, bucket, os.environ)
        self._objects: dict[str, _Object] = {}
        self._chunk_bytes = MIN_CHUNK_BYTES if load_format == ADAPTER else CHUNK_BYTES

    def snapshot(self) -> Snapshot:
        self._objects = with_retries(self._list, self.uri, advance=self._advance)
        if not self._objects:
            raise StartupError(
                f"{self.uri}: no objects were found: check the names of the {self._kind.bucket} and the folder."
            )
        wanted = select_files(self.uri, self._objects, load_format=self._load_format, file=self._file)
        objects = {name: self._objects[name] for name in wanted.names}
        listing = "\n".join(f"{name} {o.num_bytes} {o.e_tag}" for name, o in sorted(objects.items()))
        version = hashlib.sha256(listing.encode()).hexdigest()[:DIGEST_CHARS]
        sizes = {name: o.num_bytes for name, o in objects.items()}
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

        objects: dict[str, _Object] = {}
        with self._translate_errors():
            for page in obstore.list(self._store, self._folder or None):
                for meta in page:
                    name = meta["path"].removeprefix(self._folder).lstrip("/")
                    objects[name] = _Object(meta["path"], meta["size"], _quoted(meta["e_tag"]))
        return objects

    def _download_object(self, found: _Object, target: Path) -> None:
        partial = target.with_name(f"{target.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()

        def num_there() -> int:
            return partial.stat().st_size if partial.exists() else found.num_bytes

        name = f"{self.uri}: {found.key}"
        with_retries(lambda: self._download(found, partial), name, progress=num_there, advance=self._advance)
        with suppress(FileNotFoundError):  # on a volume without locks, another process may have renamed it already
            partial.replace(target)

    def _download(self, found: _Object, partial: Path) -> None:
        """Resume the download of one object. The file is never truncated: on a volume without locks, another process
        may write the same bytes to the same offsets.
        """
        offset = partial.stat().st_size
        if offset == found.num_bytes:
            return
        with self._translate_errors(), partial.open("r+b") as file:
            response, offset = _opened(self._store, found, offset)
            file.seek(offset)
            for chunk in response.stream(self._chunk_bytes):
                file.write(chunk)
                self._advance(len(chunk))
        if partial.stat().st_size < found.num_bytes:
            raise Interrupted("the connection ended early")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate the client's errors: raise Interrupted if a retry may help, else StartupError."""
        from obstore.exceptions import BaseError, PreconditionError

        try:
            yield
        except PreconditionError as error:
            raise StartupError(
                f"{self.uri}: an object was replaced during the download: fetch the model again."
            ) from error
        except (BaseError, FileNotFoundError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        text, kind = str(error), self._kind
        match, code = _STATUS.search(text), _CODE.search(text)
        status = int(match[1]) if match else 404 if isinstance(error, FileNotFoundError) else None
        if any(address in text for address in _METADATA_SERVICES):
            return StartupError(f"{self.uri}: no credentials. {kind.remedy}")
        if status in (401, 403):
            return StartupError(f"{self.uri}: access was denied ({code[1] if code else status}). {kind.remedy}")
        if status == 404:
            return StartupError(
                f"{self.uri}: the {kind.bucket} or object does not exist: check its name and the endpoint."
            )
        if status is None or status in _AGAIN:
            return Interrupted(f"the server returned {status}" if status else _why_unreachable(error))
        hint = f" {kind.redirected}" if kind.redirected and status in (301, 307, 400) else ""
        return StartupError(f"{self.uri}: the server returned {status} {code[1] if code else ''}.{hint}")


def object_store_model(uri: str, *, load_format: str, advance: Advance = ignore_progress) -> ObjectStoreModel | None:
    """Return the source of a URI of an object store; None for other URIs. Raises StartupError."""
    kind = store_kind(uri)
    return None if kind is None else ObjectStoreModel(uri, kind, load_format=load_format, advance=advance)


def _opened(store: "ObjectStore", found: _Object, offset: int) -> tuple["GetResult", int]:
    """Return the object from `offset` on, or from 0 if the server ignores a range, and where it starts."""
    import obstore
    from obstore.exceptions import GenericError

    whole: GetOptions = {} if found.e_tag is None else {"if_match": found.e_tag}
    if offset:
        try:
            return obstore.get(store, found.key, options={**whole, "range": (offset, found.num_bytes)}), offset
        except GenericError as error:
            if "non-partial" not in str(error):
                raise
    return obstore.get(store, found.key, options=whole), 0


def _quoted(e_tag: str | None) -> str | None:
    """Return an ETag as a precondition needs it; Azure lists ETags without quotes."""
    return e_tag if e_tag is None or e_tag.endswith('"') else f'"{e_tag}"'


def _split(path: str) -> tuple[str, str | None]:
    """Split a path into the folder and the requested GGUF file or glob in it, if any."""
    folder, _, last = path.strip("/").rpartition("/")
    if last.endswith(".gguf"):
        return folder, last
    return path.strip("/"), None


def _why_unreachable(error: Exception) -> str:
    """Extract the address and the reason from the client's long message."""
    text, first = str(error), first_line(error)
    asked, reason = _ASKED.search(text), _REASON.findall(text)
    why = reason[-1] if reason else first.rpartition(" - ")[2].removeprefix("HTTP error: ")
    return f"{asked[1]} cannot be reached: {why}" if asked else why
