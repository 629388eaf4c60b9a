"""`WorkerGroup`: what the workers of one router have in common: a folder that only they can enter.

Whether they drain is a file in it, so that it counts for all of them whichever was asked, and for one that is started
anew.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """`folder`: None for a router of one worker."""

    folder: Path | None = None
    number: int = 0

    def drain(self) -> None:
        if self.folder is not None:
            self._mark.touch()

    def resume(self) -> None:
        if self.folder is not None:
            self._mark.unlink(missing_ok=True)

    @property
    def is_draining(self) -> bool | None:
        """None where there is nobody else to ask."""
        return None if self.folder is None else self._mark.exists()

    @property
    def _mark(self) -> Path:
        assert self.folder is not None
        return self.folder / "draining"
