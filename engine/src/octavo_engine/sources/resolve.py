"""Resolves a model's name to its files, without loading them and without torch.

`resolve_model` accepts the forms that `model_uri` lists and first downloads a model that is not on this machine. A
model that is not supported raises an error that names it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.download_dir import ModelSource, fetch_into
from octavo_engine.sources.file_selection import ADAPTER
from octavo_engine.sources.gguf_config import gguf_to_hf_config
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.sources.hub import HubModel, download_from_hugging_face
from octavo_engine.sources.json_file import read_json_object, read_optional_json
from octavo_engine.sources.model_files import LOAD_FORMATS, ModelFiles
from octavo_engine.sources.model_scope import ModelScopeModel
from octavo_engine.sources.model_uri import LocalModel, download_folder, locate_local, parse_hub_uri
from octavo_engine.sources.object_store import object_store_model
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.sources.quantised_config import read_quantisation
from octavo_engine.sources.weight_choice import choose_weights, with_shards
from octavo_engine.wire.errors import StartupError

#: RoPE keys that transformers 4 has at the top level of a config, and transformers 5 in `rope_parameters`.
_OLDER_ROPE = {"rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rope_scaling"}
_FORMAT_OF_SUFFIX = {".gguf": "gguf", ".safetensors": "safetensors", ".bin": "pt"}


def resolve_files(config: EngineConfig) -> ModelFiles:
    """Locate the files of the configured model. Raises StartupError."""
    files = resolve_model(
        config.model,
        revision=config.revision,
        load_format=config.load_format,
        download_dir=download_dir(config),
        overrides=config.hf_overrides,
    )
    if config.model_impl == "transformers" and files.gguf is not None:
        raise StartupError(f"{files.gguf}: --model-impl transformers reads no GGUF files: omit it, or use safetensors.")
    method = "gguf" if files.gguf is not None else files.quantisation and files.quantisation.method
    if config.quantization not in (None, "int8", "int4") and config.quantization != method:
        raise StartupError(
            f"{files.name}: --quantization {config.quantization}, but the checkpoint's method is {method or 'none'}: "
            "omit it, or use another checkpoint."
        )
    return files


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace keys of a config. As in vLLM, nested configs (text_config) are merged; other objects are replaced."""
    merged = dict(config)
    if overrides.get("rope_parameters"):
        merged.pop("rope_scaling", None)  # transformers would prefer it
    elif older := sorted(_OLDER_ROPE & overrides.keys()):
        merged |= _with_older_rope(merged.pop("rope_parameters", None), older)
    for key, value in overrides.items():
        own = merged.get(key)
        is_nested = key.endswith("_config") and key != "quantization_config"
        merged[key] = _merged(own, value) if is_nested and isinstance(own, dict) and isinstance(value, dict) else value
    return merged


def _with_older_rope(rope: Any, overridden: list[str]) -> dict[str, Any]:
    """Spell `rope_parameters`, which have priority, with transformers 4's keys, like the `overridden` keys."""
    if not isinstance(rope, dict):
        return {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise StartupError(
            f"hf_overrides: {', '.join(overridden)} cannot replace the RoPE of each layer type ({', '.join(rope)}): "
            "replace rope_parameters."
        )
    beside = {key: rope[key] for key in _OLDER_ROPE & rope.keys()}
    return {**beside, "rope_scaling": {key: value for key, value in rope.items() if key not in beside}}


def with_local_adapters(config: EngineConfig) -> EngineConfig:
    """Return the settings with folders in place of the locations of adapters, which are downloaded if need be."""
    folder = download_dir(config)
    local = (replace(module, path=str(locate_adapter(module.path, folder))) for module in config.lora_modules)
    return replace(config, lora_modules=tuple(local))


def download_dir(config: EngineConfig) -> Path | None:
    return None if config.download_dir is None else Path(config.download_dir).expanduser()


def resolve_text_files(config: EngineConfig, files: ModelFiles) -> ModelFiles:
    """Locate the files of the tokenizer. `files`: those of the model. Raises StartupError."""
    if config.tokenizer is None:
        return files
    return resolve_model(config.tokenizer, download_dir=download_dir(config))


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    download_dir: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelFiles:
    """Locate a model's files. Raises StartupError: one line with the model or the file, and a remedy.

    `download_dir`: folder for downloads, in the layout of the hub's cache. None: the cache of each hub.
    `overrides`: keys that replace those of config.json.
    """
    if load_format not in LOAD_FORMATS:
        raise StartupError(f"load format {load_format!r} is unknown: use one of {', '.join(LOAD_FORMATS)}.")
    location = locate(model, revision, load_format, download_dir)
    if location.is_dir():
        files = _open_folder(model, location, load_format)
    else:
        files = _open_file(model, location, load_format)
    files = replace(files, config=_merged(files.config, overrides or {}))
    return replace(files, quantisation=read_quantisation(files))


def locate_adapter(
    location: str,
    download_dir: Path | None = None,
    advance: Advance = ignore_progress,
    *,
    revision: str | None = None,
) -> Path:
    """Return the folder of an adapter; download it if `location` is a hub or a bucket. Raises StartupError."""
    return locate(location, revision, ADAPTER, download_dir, advance)


def locate(
    model: str, revision: str | None, load_format: str, download_dir: Path | None, advance: Advance = ignore_progress
) -> Path:
    """Return the path of a model, or of an adapter, on this machine; download it if need be. Raises StartupError."""
    if (local := locate_local(model)) is not None:
        return local
    if (stored := object_store_model(model, load_format=load_format, advance=advance)) is not None:
        return fetch_into(download_folder(model, download_dir), stored, advance)
    hub, repo, file = parse_hub_uri(model)
    if hub == "ms":
        source = ModelScopeModel(repo, revision=revision, load_format=load_format, file=file, advance=advance)
        return fetch_into(download_folder(source.uri, download_dir), source, advance)
    return download_from_hugging_face(repo, revision, load_format, file, download_dir, advance)


def _open_folder(model: str, folder: Path, load_format: str) -> ModelFiles:
    if load_format == "dummy" and (folder / "config.json").is_file():
        return _hugging_face_files(model, folder, "dummy", ())
    kind, weights = choose_weights(folder, "gguf" if load_format == "dummy" else load_format)
    if kind == "gguf":
        return _gguf_files(model, folder, weights, load_format, tokenizer_folder=folder)
    return _hugging_face_files(model, folder, kind, weights)


def _open_file(model: str, file: Path, load_format: str) -> ModelFiles:
    kind = _FORMAT_OF_SUFFIX.get(file.suffix)
    if kind is None:
        raise StartupError(f"{file}: not a weight file: use a folder, *.gguf, *.safetensors or *.bin.")
    if load_format not in ("auto", "dummy", kind):
        raise StartupError(f"{file}: is not a {load_format} file: omit --load-format, or use another file.")
    if kind == "gguf":
        return _gguf_files(model, file.parent, with_shards(file), load_format, tokenizer_folder=None)
    if load_format == "dummy":
        return _hugging_face_files(model, file.parent, "dummy", ())
    return _hugging_face_files(model, file.parent, kind, with_shards(file))


def _hugging_face_files(model: str, folder: Path, load_format: str, weights: tuple[Path, ...]) -> ModelFiles:
    if not (folder / "config.json").is_file():
        raise StartupError(f"{folder}: no config.json beside the weights.", code="ModelNotFound")
    return ModelFiles(
        name=model,
        root=folder,
        load_format=load_format,
        config=_with_quantize_config(folder),
        weight_files=weights,
        generation=read_optional_json(folder / "generation_config.json"),
        **_tokenizer_files(folder),
    )


def _gguf_files(
    model: str, folder: Path, weights: tuple[Path, ...], load_format: str, *, tokenizer_folder: Path | None
) -> ModelFiles:
    """Locate a GGUF model's files. A folder's tokenizer has precedence; files beside a single GGUF are not used."""
    header = read_gguf(weights[0])
    tokenizer_files = _tokenizer_files(tokenizer_folder) if tokenizer_folder else {}
    if not (tokenizer_files.get("chat_template") or tokenizer_files.get("named_chat_templates")):
        tokenizer_files |= _by_name(_gguf_templates(header.metadata))
    return ModelFiles(
        name=model,
        root=folder,
        load_format="dummy" if load_format == "dummy" else "gguf",
        config=gguf_to_hf_config(header),
        weight_files=() if load_format == "dummy" else weights,
        gguf=weights[0],
        **tokenizer_files,
    )


def _tokenizer_files(folder: Path) -> dict[str, Any]:
    tokenizer_json = folder / "tokenizer.json"
    config = read_optional_json(folder / "tokenizer_config.json")
    return {
        "tokenizer_json": tokenizer_json if tokenizer_json.is_file() else None,
        "tokenizer_config": config,
        **_by_name(_chat_templates(folder, config)),
    }


def _by_name(templates: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields of `ModelFiles` for templates by name; entries that are no texts are ignored."""
    named = {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
    return {"chat_template": named.pop("default", None), "named_chat_templates": named}


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> Mapping[Any, Any]:
    """Return the templates in files; without a default among them, also those of the configuration.

    transformers has the same order.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if "default" in found:
        return found
    legacy = read_optional_json(folder / "chat_template.json")
    given = legacy.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    return {**(given if isinstance(given, dict) else {"default": given}), **found}


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")}
    return {"default": metadata.get(key), **named}


def _with_quantize_config(folder: Path) -> dict[str, Any]:
    """Return config.json; older tools write GPTQ's settings to a file of their own."""
    config, settings = read_json_object(folder / "config.json"), read_optional_json(folder / "quantize_config.json")
    return {"quantization_config": {"quant_method": "gptq", **settings}, **config} if settings else config


def fetch_model(model: str, *, to: Path | None = None, revision: str | None = None, load_format: str = "auto") -> Path:
    """Download or copy a model for `octavo fetch`; return the path to serve.

    Without `to`, the model is stored where `octavo serve` finds it by its name: in the hub's cache, or in Octavo's.
    Raises StartupError, also if the model was fetched but cannot be served.
    """
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
