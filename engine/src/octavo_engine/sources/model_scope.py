"""Downloads models from ModelScope with its own client, which retries, resumes and verifies downloads."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_engine.sources.download_dir import Snapshot
from octavo_engine.sources.file_selection import select_files
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.sources.retries import Unreachable
from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from modelscope_hub import FileInfo

SCHEME = "ms://"
DIGEST_CHARS = 12
_KIND = "model"


class ModelScopeModel:
    """A `ModelSource` on ModelScope. Raises StartupError if its client is not installed."""

    def __init__(
        self,
        repo: str,
        *,
        revision: str | None,
        load_format: str,
        file: str | None,
        advance: Advance = ignore_progress,
    ) -> None:
        at = f"@{revision}" if revision else ""
        self.uri = f"{SCHEME}{repo}{at}" + (f"/{file}" if file else "")
        self._repo, self._revision, self._load_format, self._file = repo, revision, load_format, file
        self._advance = advance
        if find_spec("modelscope_hub") is None:
            raise StartupError(
                f"{self.uri}: ModelScope's client is missing: install it by pip install 'octavo-engine[modelscope]'"
            )

    def snapshot(self) -> Snapshot:
        infos = {info.path: info for info in self._list() if info.type != "tree"}
        wanted = select_files(SCHEME + self._repo, infos, load_format=self._load_format, file=self._file)
        listing = "\n".join(f"{name} {infos[name].size} {infos[name].blob_id}" for name in sorted(wanted.names))
        version = hashlib.sha256(listing.encode()).hexdigest()[:DIGEST_CHARS]
        files = {name: infos[name].size for name in wanted.names}
        return Snapshot(uri=self.uri, version=version, files=files, main=wanted.main)

    def download(self, files: Mapping[str, int], snapshot: Snapshot, staging: Path) -> None:
        from modelscope_hub import HubApi, HubConfig, ProgressCallback

        advance = self._advance

        class Counted(ProgressCallback):
            def update(self, size: int) -> None:
                advance(size)

        patterns = [escape(name) for name in files]
        api = HubApi(config=HubConfig(cache_dir=staging / ".cache"))  # for its locks
        with self._translate_errors():
            api.download_repo(
                self._repo,
                _KIND,
                revision=self._revision,
                local_dir=staging,
                allow_patterns=patterns,
                progress_callbacks=[Counted],
            )

    def _list(self) -> "list[FileInfo]":
        from modelscope_hub import HubApi, HubConfig

        api = HubApi(config=HubConfig())  # the client's default config keeps the first environment
        with self._translate_errors():
            infos: list[FileInfo] = api.list_repo_files(self._repo, _KIND, revision=self._revision)
        return infos

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate the client's errors into StartupError with a remedy; Unreachable if its retries have failed."""
        from modelscope_hub import AuthenticationError, HubError, NotExistError, PermissionDeniedError

        try:
            yield
        except HubError as error:
            text = next((line for line in error.message.splitlines() if line.strip()), type(error).__name__)
            if error.retryable:
                raise Unreachable(f"{self.uri}: {text}: check the network, then try again.") from error
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                raise StartupError(f"{self.uri}: ModelScope denied access: {_TOKEN}.") from error
            if isinstance(error, NotExistError):
                raise StartupError(
                    f"{self.uri}: no such model or revision on ModelScope: correct it; of a private model, {_TOKEN}."
                ) from error
            raise StartupError(f"{self.uri}: cannot be downloaded from ModelScope: {text}") from error


_TOKEN = "set MODELSCOPE_API_TOKEN (on Kubernetes: an entry of the Secret that spec.model.secretRef names)"
