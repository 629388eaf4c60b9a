"""Whether a download fits on its volume: said before it begins, with the sum, not after an hour."""

import shutil
from pathlib import Path

from octavo_engine.sources.progress import size_text
from octavo_engine.wire.errors import StartupError


def check_disk_space(name: str, folder: Path, *, needed_bytes: int, num_files: int) -> None:
    """Raises StartupError. `folder` needn't exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise StartupError(
            f"{name}: {num_files} files with {size_text(needed_bytes)} are still to come into {folder}, where "
            f"{size_text(free)} are free: {size_text(needed_bytes - free)} too little. Make room, or choose a larger "
            "volume (on Kubernetes: spec.model.cache)."
        )
