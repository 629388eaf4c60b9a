"""`InFlight`: the running responses of a server, so that a shutdown can end each of them with an error."""

from typing import Protocol


class Endable(Protocol):
    def end(self, error: Exception) -> None: ...


class InFlight:
    """After `end_all`, each added response is ended at once, until `reopen`."""

    def __init__(self) -> None:
        self._open: set[Endable] = set()
        self._ended_by: Exception | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, response: Endable) -> None:
        self._open.add(response)
        if self._ended_by is not None:
            response.end(self._ended_by)

    def discard(self, response: Endable) -> None:
        self._open.discard(response)

    def end_all(self, error: Exception) -> None:
        self._ended_by = error
        for response in self._open:
            response.end(error)

    def reopen(self) -> None:
        self._ended_by = None
