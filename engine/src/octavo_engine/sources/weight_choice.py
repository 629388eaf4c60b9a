"""Selects the weight files of a folder: safetensors before `.bin` before GGUF, unless a load format is given.

A complete single file has precedence over shards, as in transformers. Shards are listed by the index; each must exist.
If several choices remain, the error lists them.
"""

import re
from pathlib import Path

from octavo_engine.sources.json_file import read_json_object
from octavo_engine.wire.errors import StartupError

ORDER = ("safetensors", "pt", "gguf")
_STEMS = {"safetensors": ("model", "safetensors"), "pt": ("pytorch_model", "bin")}
_NOT_WEIGHTS = ("consolidated", "adapter", "optimizer", "scheduler", "training_args", "rng_state")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>\w+)$")


def choose_weights(folder: Path, load_format: str) -> tuple[str, tuple[Path, ...]]:
    """Return the format and weight files. Raises StartupError for no files, an ambiguous choice, or a missing file."""
    for candidate in ORDER if load_format == "auto" else (load_format,):
        files = _gguf_files(folder) if candidate == "gguf" else _hugging_face_files(folder, candidate)
        if files:
            return candidate, files
    wanted = {"auto": "weights (*.safetensors, pytorch_model*.bin or *.gguf)", "pt": "PyTorch weights (*.bin)"}
    raise StartupError(f"{folder}: no {wanted.get(load_format, f'*.{load_format} weights')} in this folder.")


def _hugging_face_files(folder: Path, load_format: str) -> tuple[Path, ...]:
    stem, suffix = _STEMS[load_format]
    single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        return _indexed_shards(index)
    return _only_choice(folder, [f for f in sorted(folder.glob(f"*.{suffix}")) if not f.name.startswith(_NOT_WEIGHTS)])


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    shards = tuple(index.parent / name for name in sorted(set(read_weight_map(index).values())))
    for shard in shards:
        if not shard.is_file():
            raise StartupError(f"{shard}: missing weight file: {index.name} lists it.")
    return shards


def read_weight_map(index: Path) -> dict[str, str]:
    """Read a `*.index.json`: tensor name -> file name. Raises StartupError for a file name outside the folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index}: has no weight_map.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise StartupError(f"{index}: {name!r} is not a file name.")
    return weight_map


def _gguf_files(folder: Path) -> tuple[Path, ...]:
    files = [f for f in sorted(folder.glob("*.gguf")) if not f.name.startswith("mmproj")]
    return _only_choice(folder, files)


def _only_choice(folder: Path, files: list[Path]) -> tuple[Path, ...]:
    firsts = [file for file in files if (match := _SHARD.match(file.name)) is None or int(match["number"]) == 1]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise StartupError(f"{folder}: there is more than one weight file: choose one as the model: {names}.")
    return with_shards(firsts[0]) if firsts else with_shards(files[0]) if files else ()


def with_shards(file: Path) -> tuple[Path, ...]:
    """Return all shards of the set that `file` belongs to (`x-00001-of-00003.gguf`), or only the file."""
    match = _SHARD.match(file.name)
    if match is None:
        return (file,)
    shards = [
        file.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.{match['suffix']}")
        for number in range(1, int(match["count"]) + 1)
    ]
    for shard in shards:
        if not shard.is_file():
            raise StartupError(f"{shard}: missing weight file: {file.name} is one of {len(shards)} shards.")
    return tuple(shards)
