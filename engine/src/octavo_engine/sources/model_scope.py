"""Downloads models from ModelScope with its own client, which caches and resumes downloads."""

from pathlib import Path

from octavo_engine.sources.file_selection import select_files
from octavo_engine.wire.errors import StartupError

SCHEME = "ms://"


def download_from_model_scope(
    repo: str, revision: str | None, load_format: str, file: str | None, cache: Path | None = None
) -> Path:
    try:
        from modelscope.hub.api import HubApi
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise StartupError(
            f"{repo}: ModelScope's client is missing: install it by pip install 'octavo-engine[modelscope]'"
        ) from error
    try:
        names = [entry["Path"] for entry in HubApi().get_model_files(repo, revision=revision, recursive=True)]
        wanted = select_files(SCHEME + repo, names, load_format=load_format, file=file)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(wanted.names), cache_dir=cache))
    except (OSError, ValueError, RuntimeError) as error:
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StartupError(f"{repo}: cannot be downloaded from ModelScope: {line}") from error
    return folder if wanted.main is None else folder / wanted.main
