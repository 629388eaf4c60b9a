"""Downloads from the Hugging Face hub and from ModelScope: only the files that will be read, with progress bars.

The hub clients do caching, resuming, tokens and `HF_HUB_OFFLINE`; this module decides which files to ask for and turns
their many exceptions into one line that names the model. One weight format is fetched, in the order of preference.
"""

import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from octavo_engine.sources.weight_choice import ORDER
from octavo_engine.wire.errors import StartupError

_METADATA = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = {"safetensors": ["*.safetensors"], "pt": ["pytorch_model*.bin"], "gguf": ["*.gguf"]}
_IGNORED = ["*/*", "consolidated*", "adapter*", "training_args*", "optimizer*"]

#: (patterns to fetch, patterns to skip) -> the local folder
Fetch = Callable[[list[str], list[str]], str]


def download_from_hugging_face(repo: str, revision: str | None, load_format: str, file: str | None) -> Path:
    """A folder, or the GGUF file that `file` (a path or glob in the repository) selects."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unreachable: tuple[type[BaseException], ...] = (HfHubHTTPError, OSError, *_transport_errors())

    def fetch(allow: list[str], ignore: list[str]) -> str:
        return str(snapshot_download(repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore))

    def list_files() -> list[str]:
        try:
            return list(HfApi().list_repo_files(repo, revision=revision))
        except unreachable:
            folder = snapshot_download(repo, revision=revision, allow_patterns=_METADATA, local_files_only=True)
            return [path.name for path in Path(folder).iterdir()]

    try:
        return _download(repo, load_format, file, fetch, list_files)
    except HFValidationError as error:
        raise StartupError(f"{repo}: neither a local path nor a Hugging Face model id.") from error
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"{repo}: not in the local Hugging Face cache, and the hub can't be reached (offline, or HF_HUB_OFFLINE "
            "is set): check the network, or name a local folder."
        ) from error
    except unreachable as error:
        raise StartupError(f"{repo}: can't be downloaded from the Hugging Face hub: {_first_line(error)}") from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """The HTTP client's own errors, which the hub client lets through; it is built on another one every other year."""
    bases = {"httpx2": "HTTPError", "httpx": "HTTPError", "requests": "RequestException"}
    return tuple(getattr(sys.modules[name], base) for name, base in bases.items() if name in sys.modules)


def download_from_model_scope(repo: str, revision: str | None, load_format: str, file: str | None) -> Path:
    try:
        from modelscope.hub.api import HubApi
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise StartupError(
            f"{repo}: ModelScope needs its client. Install it with: pip install 'octavo-engine[modelscope]'"
        ) from error

    def fetch(allow: list[str], ignore: list[str]) -> str:
        return str(snapshot_download(repo, revision=revision, allow_patterns=allow, ignore_patterns=ignore))

    def list_files() -> list[str]:
        return [entry["Path"] for entry in HubApi().get_model_files(repo, revision=revision, recursive=True)]

    try:
        return _download(repo, load_format, file, fetch, list_files)
    except (OSError, ValueError, RuntimeError) as error:
        raise StartupError(f"{repo}: can't be downloaded from ModelScope: {_first_line(error)}") from error


def _download(repo: str, load_format: str, file: str | None, fetch: Fetch, list_files: Callable[[], list[str]]) -> Path:
    if file is not None:
        return _one_gguf(repo, Path(fetch([file], [])), file)
    if load_format == "dummy":
        return Path(fetch(_METADATA, _IGNORED))
    for candidate in ORDER if load_format == "auto" else (load_format,):
        patterns = _WEIGHTS[candidate]
        if candidate == "gguf":
            patterns = _single_gguf(repo, list_files())
        folder = Path(fetch([*_METADATA, *patterns], _IGNORED))
        if any(path for pattern in patterns for path in folder.glob(pattern)):
            return folder
    raise StartupError(f"{repo}: the repository has no weights in the format {load_format}.")


def _single_gguf(repo: str, names: list[str]) -> list[str]:
    """A repository often holds one GGUF per quantisation: hundreds of gigabytes must not be fetched unasked."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) > 1:
        shown = ", ".join(ggufs[:20])
        raise StartupError(f"{repo}: the repository has several GGUF files: name one, as hf://{repo}/FILE: {shown}.")
    return ggufs


def _one_gguf(repo: str, folder: Path, file: str) -> Path:
    paths = sorted(path for path in folder.rglob("*.gguf") if fnmatch(path.relative_to(folder).as_posix(), file))
    shards = [path for path in paths if "-of-" not in path.name or "-00001-of-" in path.name]
    if not shards:
        raise StartupError(f"{repo}: the repository has no GGUF file that matches {file!r}.")
    if len(shards) > 1:
        names = ", ".join(path.name for path in shards)
        raise StartupError(f"{repo}: {file!r} matches several GGUF files: name one of them: {names}.")
    return shards[0]


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
