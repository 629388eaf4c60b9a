"""`ListedServices`: the services behind a router and their models, from a file that its owner keeps up to date.

With the list the router knows a model that has no replica now, and that a name outside the list and the replicas'
reports does not exist. The file is JSON: `{"services": [{"name": "llm", "models": ["llm", "llm-large"]}]}`; a service
may also have `adapters`, `sleeps`, `wakeSeconds` and `holdSeconds`. Unknown fields are ignored, so that an older router
reads the file of a newer operator.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from octavo_engine.wire.errors import StartupError

from octavo_server.http.api_keys import FileWatch, read_watched

logger = logging.getLogger(__name__)

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Service(msgspec.Struct, frozen=True):
    """`models`: the names by which requests may ask for the service's model. `adapters`: the names of its adapters.
    `sleeps`: it has no replica now, and a
    request wakes it. `wake_s`: length of its last wake, None if no wake was measured. `hold_s`: its own limit for
    requests that wait for a replica, None for the router's.
    """

    name: str
    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    sleeps: bool = False
    wake_s: Seconds | None = msgspec.field(default=None, name="wakeSeconds")
    hold_s: Seconds | None = msgspec.field(default=None, name="holdSeconds")

    def serves(self, model: str) -> bool:
        return model in self.models or model in self.adapters


class _File(msgspec.Struct, frozen=True):
    services: tuple[Service, ...]


_decode = msgspec.json.Decoder(_File).decode


class ListedServices:
    """Raises StartupError if the file is missing or not valid. If it becomes so later, this is logged, and the latest
    list stays."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._watch = FileWatch([path], clock)
        self._services = _read(path)

    @property
    def services(self) -> tuple[Service, ...]:
        if self._watch.has_changed():
            try:
                self._services = _read(self._path)
            except StartupError as error:
                logger.error("the list of services was not reloaded, the previous one stays: %s", error)
            else:
                logger.info("reloaded the list of services: %s", ", ".join(s.name for s in self._services) or "none")
        return self._services


def _read(path: Path) -> tuple[Service, ...]:
    try:
        return _decode(read_watched(path)).services
    except OSError as error:
        raise StartupError(f"--services-file {path}: cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"--services-file {path}: {error}: write {{'services': [{{'name', 'models'}}]}}.") from None
