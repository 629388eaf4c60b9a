"""`weights_fingerprint`: equal weights have equal hex strings, independent of paths and file names.

It keys the prefix cache across replicas, so it covers content, not paths, revisions or times, and must be fast for a
checkpoint of 100 GB (< 1 s): of each file it hashes the size, the first MiB (headers with all names, shapes and
offsets) and 128 evenly spaced samples of 16 KiB. Training changes every weight, so a finetune differs in each sample;
an edit of a few bytes between samples is not detected. Files up to 3 MiB are hashed completely.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from octavo_engine.settings.records import Quantization
from octavo_engine.sources.file_selection import ADAPTER_FILES
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError

DOMAIN = b"octavo-weights1"
HEAD_BYTES = 1 << 20
NUM_SAMPLES = 128
SAMPLE_BYTES = 16 << 10
#: Keys of `config.json` that do not affect the model's computations.
_UNRELATED = frozenset({"_name_or_path", "transformers_version", "use_cache"})


def weights_fingerprint(files: ModelFiles, quantization: Quantization | None = None) -> str:
    """Compute the fingerprint. Dummy weights depend only on the config, and so does their fingerprint.

    `quantization`: int8 and int4 change the weights while they load; gguf does not.
    """
    digest = hashlib.sha256(DOMAIN)
    _add(digest, files.load_format.encode())
    _add(digest, _canonical_config(files.config))
    for file_digest in sorted(_file_digest(path) for path in files.weight_files):
        _add(digest, file_digest)
    if quantization in ("int8", "int4"):
        _add(digest, quantization.encode())
    return digest.hexdigest()


def adapter_fingerprint(folder: Path) -> str:
    """Compute the hash of an adapter's files, which covers all of their bytes. Raises StartupError."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        try:
            with (folder / name).open("rb") as file:
                _add(digest, hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise StartupError(f"{folder / name}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Add a part with its length, so that different lists of parts never give the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _canonical_config(config: dict[str, Any]) -> bytes:
    related = {key: value for key, value in config.items() if key not in _UNRELATED}
    return json.dumps(related, sort_keys=True, separators=(",", ":")).encode()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            for start, length in _samples(size):
                file.seek(start)
                digest.update(file.read(length))
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.digest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Return samples as (start, length); the last sample ends at the end of the file."""
    rest = size - HEAD_BYTES
    if rest <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    step = (last - HEAD_BYTES) / (NUM_SAMPLES - 1)
    return [(0, HEAD_BYTES)] + [(HEAD_BYTES + round(i * step), SAMPLE_BYTES) for i in range(NUM_SAMPLES)]
