"""Checks before a download starts that it fits on its volume."""

import shutil
from pathlib import Path

from octavo_engine.sources.progress import size_text
from octavo_engine.wire.errors import StartupError


def check_disk_space(name: str, folder: Path, *, needed_bytes: int, num_files: int) -> None:
    """Raise StartupError if `needed_bytes` exceed the free space. `folder` need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise StartupError(
            f"{name}: {num_files} files of {size_text(needed_bytes)} remain to be fetched into {folder}, where "
            f"{size_text(free)} are free: {size_text(needed_bytes - free)} too little. Free disk space, or choose a "
            "larger volume (on Kubernetes: spec.model.cache)."
        )
