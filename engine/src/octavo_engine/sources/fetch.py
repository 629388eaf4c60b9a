"""`fetch_model`: a model from wherever it is to a folder that is ready to be served. What `octavo fetch` does.

Without a folder it lands where `octavo serve` looks for it by the same name: the hub's cache, or our own.
"""

from pathlib import Path

from octavo_engine.sources.hub import HubModel
from octavo_engine.sources.local import LocalModel
from octavo_engine.sources.model_source import ModelSource, fetch_into
from octavo_engine.sources.model_uri import locate_local, parse_hub_uri
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.sources.s3 import SCHEME as S3_SCHEME
from octavo_engine.sources.s3 import S3Model
from octavo_engine.wire.errors import StartupError


def fetch_model(model: str, *, to: Path | None = None, revision: str | None = None, load_format: str = "auto") -> Path:
    """What to serve. Raises StartupError, also for a model that was fetched and can't be served."""
    if to is None:
        files = resolve_model(model, revision=revision, load_format=load_format)
        return files.gguf or files.root
    fetched = fetch_into(to.absolute(), _source(model, revision, load_format))
    resolve_model(str(fetched), load_format=load_format)
    return fetched


def _source(model: str, revision: str | None, load_format: str) -> ModelSource:
    if (location := locate_local(model)) is not None:
        return LocalModel(model, location, load_format=load_format)
    if model.startswith(S3_SCHEME):
        return S3Model(model, load_format=load_format)
    hub, repo, file = parse_hub_uri(model)
    if hub == "ms":
        raise StartupError(f"{model}: ModelScope's client keeps a cache of its own: leave --to out.")
    return HubModel(repo, revision=revision, load_format=load_format, file=file)
