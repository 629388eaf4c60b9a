"""Downloads models from the Hugging Face hub into its cache, which all tools share, or, with `HubModel`, to a folder.

The hub client caches downloads, checks them and handles tokens. This module selects the files, prevents several
processes from downloading the same model at a time, and resumes after network errors. It turns errors of the client
into one line with a remedy, and marks errors after which a retry may help.
"""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.sources.download_dir import Snapshot, check_disk_space, lock_folder
from octavo_engine.sources.file_selection import FileSelection, select_files
from octavo_engine.sources.progress import (
    Advance,
    folder_bytes,
    ignore_progress,
    show_progress,
    size_text,
)
from octavo_engine.sources.retries import Interrupted, Unreachable, with_retries
from octavo_engine.wire.errors import StartupError, first_line

VARIABLE = "HF_TOKEN"
_AGAIN = (408, 429, 500, 502, 503, 504)
_TOKEN = "set HF_TOKEN (on Kubernetes: a Secret with the entry HF_TOKEN in spec.model.secretRef)"


if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

logger = logging.getLogger(__name__)

SCHEME = "hf://"
#: An incomplete file that was not written to for this time was left by a killed process and is deleted.
ABANDONED_AFTER_S = 600.0
#: The client's own 10 MiB may take minutes on a slow network, in which it would show no progress.
CHUNK_BYTES = 2**18


def download_from_hugging_face(
    repo: str,
    revision: str | None,
    load_format: str,
    file: str | None,
    cache: Path | None = None,
    advance: Advance = ignore_progress,
) -> Path:
    """Download a model into the hub's cache, or a cache in the folder `cache`.

    Returns its folder, or the GGUF file selected by `file`, a path or glob.
    """
    try:
        info = _info(repo, revision)
    except (Interrupted, StartupError) as error:
        if (cached := _cached(repo, revision, load_format, file, cache)) is not None:
            if not isinstance(error, Unreachable):  # no warning if the user has chosen to be offline
                logger.warning("%s: %s; the cached model is used", repo, str(error).removeprefix(f"{repo}: "))
            return cached
        if not isinstance(error, Interrupted):
            raise
        info = with_retries(lambda: _info(repo, revision), SCHEME + repo, advance=advance)
    wanted = select_files(SCHEME + repo, _sizes(info), load_format=load_format, file=file)
    return _main(_into_cache(repo, revision, info, wanted, cache, advance), wanted)


class HubModel:
    """A `ModelSource` on the Hugging Face hub."""

    def __init__(self, repo: str, *, revision: str | None, load_format: str, file: str | None) -> None:
        self.uri = f"{SCHEME}{repo}" + (f"/{file}" if file else "")
        self._repo, self._revision, self._load_format, self._file = repo, revision, load_format, file

    def snapshot(self) -> Snapshot:
        info = with_retries(lambda: _info(self._repo, self._revision), self.uri)
        sizes = _sizes(info)
        wanted = select_files(SCHEME + self._repo, sizes, load_format=self._load_format, file=self._file)
        files = {name: sizes[name] for name in wanted.names}
        return Snapshot(uri=self.uri, version=str(info.sha), files=files, main=wanted.main)

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        for abandoned in (staging / ".cache").rglob("*.incomplete"):
            abandoned.unlink(missing_ok=True)

        def fetch() -> Path:
            with translate_hub_errors(self._repo):
                return _snapshot(self._repo, snapshot.version, tuple(files), local_dir=staging)

        with_retries(fetch, self.uri, progress=lambda: folder_bytes(staging))


def _info(repo: str, revision: str | None) -> "ModelInfo":
    """Request the repository's metadata once. Raises Interrupted or StartupError."""
    from huggingface_hub import HfApi

    with translate_hub_errors(repo, revision):
        return HfApi().model_info(repo, revision=revision, files_metadata=True)


def _sizes(info: "ModelInfo") -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _snapshot(
    repo: str, revision: str | None, names: Iterable[str], advance: Advance = ignore_progress, **options: Any
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from tqdm.auto import tqdm

    class Silent(tqdm):  # type: ignore[type-arg]
        """A progress bar that shows nothing: this package shows its own progress."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES

    patterns = [escape(name) for name in names]
    return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, tqdm_class=Silent, **options))


def _cached(repo: str, revision: str | None, load_format: str, file: str | None, cache: Path | None) -> Path | None:
    """Return the path of the model if the cache holds all its files, else None."""
    try:
        with translate_hub_errors(repo, revision):
            folder = _snapshot(repo, revision, (), local_files_only=True, cache_dir=cache)
            wanted = select_files(SCHEME + repo, _known_names(repo, folder, cache), load_format=load_format, file=file)
            return _main(_snapshot(repo, revision, wanted.names, local_files_only=True, cache_dir=cache), wanted)
    except (Interrupted, StartupError):
        return None


def _known_names(repo: str, folder: Path, cache: Path | None) -> list[str]:
    """Return the repository's file names if the client has stored them, else the names of the cached files."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=folder.name, cache_dir=cache)]
    except CachedRepoTreeNotFoundError:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _into_cache(
    repo: str, revision: str | None, info: "ModelInfo", wanted: FileSelection, cache: Path | None, advance: Advance
) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    sizes = _sizes(info)
    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    blobs = folder / "blobs"

    def missing() -> list[int]:
        cached = {name: try_to_load_from_cache(repo, name, cache, info.sha) for name in wanted.names}
        return [sizes[name] for name, path in cached.items() if not isinstance(path, str)]

    def fetch() -> Path:
        with translate_hub_errors(repo, revision):
            return _snapshot(repo, revision, wanted.names, advance, cache_dir=cache)

    def fetch_all() -> Path:
        return with_retries(fetch, SCHEME + repo, progress=lambda: folder_bytes(blobs), advance=advance)

    if not missing():
        return fetch_all()
    with lock_folder(folder, advance):
        _drop_abandoned(blobs)
        left = missing()
        check_disk_space(SCHEME + repo, folder, needed_bytes=sum(left), num_files=len(left))
        logger.info("%s%s: fetching %d files, %s, into %s", SCHEME, repo, len(left), size_text(sum(left)), folder)
        with show_progress(SCHEME + repo, blobs, sum(left), advance=advance):
            return fetch_all()


def _drop_abandoned(blobs: Path) -> None:
    for path in blobs.glob("*.incomplete"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()


def _main(folder: Path, wanted: FileSelection) -> Path:
    return folder if wanted.main is None else folder / wanted.main


def set_hub_token(token: bool | str | None) -> None:
    """Use a token for downloads in this process and its children; with True or None, the hub client's own token."""
    if isinstance(token, str):
        os.environ[VARIABLE] = token


@contextmanager
def translate_hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Translate the hub client's exceptions: raise Interrupted if a retry may help, else StartupError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise StartupError(f"{repo}: this is neither a local path nor a Hugging Face model id.") from error
    except OfflineModeIsEnabled as error:
        raise Unreachable(_OFFLINE.format(repo)) from error
    except LocalEntryNotFoundError as error:
        raise _of_cause(repo, revision, error) from error
    except HfHubHTTPError as error:
        raise _of_answer(repo, revision, error) from error
    except _transport_errors() as error:
        raise Interrupted(f"the hub cannot be reached: {first_line(error)}") from error
    except OSError as error:
        if error.errno is None:  # the download does not match its size or checksum
            raise Interrupted(first_line(error)) from error
        raise StartupError(f"{repo}: cannot be stored: {error.strerror}: {error.filename}.") from error


_OFFLINE = (
    "{}: not in the local Hugging Face cache, and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set): check "
    "the network, or use a local folder."
)


def _of_cause(repo: str, revision: str | None, error: BaseException) -> Exception:
    """Translate the cause of the error "not found locally", which the client also raises if it cannot reach the hub."""
    from huggingface_hub.errors import HfHubHTTPError

    cause = error.__cause__
    if isinstance(cause, HfHubHTTPError):
        return _of_answer(repo, revision, cause)
    if isinstance(cause, _transport_errors()):
        return Interrupted(f"the hub cannot be reached: {first_line(cause)}")
    return Unreachable(_OFFLINE.format(repo))


def _of_answer(repo: str, revision: str | None, error: BaseException) -> Exception:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return StartupError(f"{repo}: access to this model must be granted: request it on its page, then {_TOKEN}.")
    if isinstance(error, RevisionNotFoundError):
        return StartupError(f"{repo}: has no branch, tag or commit {revision!r}: check the revision.")
    if isinstance(error, RepositoryNotFoundError):
        return StartupError(f"{repo}: no such model on the hub: correct the name; if it is private, {_TOKEN}.")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return StartupError(f"{repo}: the hub denied access ({status}): {_TOKEN}.")
    if status in _AGAIN:
        return Interrupted(f"the hub returned {status}")
    return StartupError(f"{repo}: cannot be downloaded from the Hugging Face hub: {first_line(error)}")


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the HTTP client, which the hub client passes on; versions of it use different ones."""
    bases = {"httpx2": "HTTPError", "httpx": "HTTPError", "requests": "RequestException"}
    return tuple(getattr(sys.modules[name], base) for name, base in bases.items() if name in sys.modules)
