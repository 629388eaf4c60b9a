"""`fetch_model`: downloads or copies a model into a folder from which it can be served, for `octavo fetch`.

Without a target folder the model is stored where `octavo serve` finds it by the same name, in the hub's or our cache.
"""

from pathlib import Path

from octavo_engine.sources.hub import HubModel
from octavo_engine.sources.local import LocalModel
from octavo_engine.sources.model_scope import ModelScopeModel
from octavo_engine.sources.model_source import ModelSource, fetch_into
from octavo_engine.sources.model_uri import locate_local, parse_hub_uri
from octavo_engine.sources.object_store import object_store_model
from octavo_engine.sources.resolve import resolve_model


def fetch_model(model: str, *, to: Path | None = None, revision: str | None = None, load_format: str = "auto") -> Path:
    """Fetch a model; return the path to serve. Raises StartupError, also for a fetched model that cannot be served."""
    if to is None:
        files = resolve_model(model, revision=revision, load_format=load_format)
        return files.gguf or files.root
    fetched = fetch_into(to.absolute(), _source(model, revision, load_format))
    resolve_model(str(fetched), load_format=load_format)
    return fetched


def _source(model: str, revision: str | None, load_format: str) -> ModelSource:
    if (location := locate_local(model)) is not None:
        return LocalModel(model, location, load_format=load_format)
    if (stored := object_store_model(model, load_format=load_format)) is not None:
        return stored
    hub, repo, file = parse_hub_uri(model)
    if hub == "ms":
        return ModelScopeModel(repo, revision=revision, load_format=load_format, file=file)
    return HubModel(repo, revision=revision, load_format=load_format, file=file)
