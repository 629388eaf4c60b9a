"""Runs kopf so that it survives any outage: an API server that is away for an hour, or a kind that is removed.

By default, kopf retries a failed request at growing intervals and then ends the process. Here each request is retried
forever at short intervals, so that the watches resume as soon as the server returns. If kopf ends nevertheless, the
reason is logged, and kopf is restarted and updates the same view.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

import kopf

from octavo_operator.names import SERVICE_LABEL

logger = logging.getLogger(__name__)

#: Group and version, plural name of the kind.
Resource = tuple[str, str]
FIRST_PAUSES_S, PAUSE_S = (0.1, 0.3, 0.5, 1.0), 2.0
RESTART_S = 5.0
LOG_INTERVAL_S = 30.0
END_S = 10.0


class RetryForever:
    """The seconds between retries of a request, without an end. kopf iterates over this object once per request."""

    def __iter__(self) -> Iterator[float]:
        return chain(FIRST_PAUSES_S, repeat(PAUSE_S))


class KopfRunner:
    """Runs kopf's watches and restarts them when they end.

    `labelled`: kinds of which only objects with the service label are watched. `on_signal`: called on SIGINT and
    SIGTERM. `on_end`: called when the watches have ended, before their restart.
    """

    def __init__(
        self,
        registry: kopf.OperatorRegistry,
        *,
        labelled: Sequence[Resource],
        namespaces: Sequence[str],
        on_signal: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._labelled = labelled
        self._namespaces = namespaces
        self._on_signal = on_signal
        self._on_end = on_end
        self._restart = asyncio.Event()

    def restart(self) -> None:
        self._restart.set()

    async def run(self) -> None:
        while True:
            try:
                await self._run_once()
            except Exception as error:  # noqa: BLE001 - a supervisor: the watches restart after any error
                logger.warning("the watches ended and are restarted: %s", error or type(error).__name__)
            self._on_end()
            await asyncio.sleep(RESTART_S)

    async def _run_once(self) -> None:
        self._restart.clear()
        restart = asyncio.create_task(self._restart.wait())
        tasks = [
            *await kopf.spawn_tasks(
                registry=self._registry,
                settings=kopf_settings(self._labelled),
                standalone=True,
                namespaces=self._namespaces,
                clusterwide=not self._namespaces,
            ),
            restart,
        ]
        for number in (signal.SIGINT, signal.SIGTERM):  # replace the handlers that kopf has installed
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=END_S)
        for task in done - {restart}:
            task.result()


def kopf_settings(labelled: Sequence[Resource]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = settings.persistence.progress_storage = NullStorage()
    settings.process.ultimate_exiting_timeout = None  # else kopf kills the process later, even if it was restarted
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = RetryForever()
    settings.watching.server_timeout = 300
    settings.watching.chunk_size = 100  # a page with thousands of objects would double the process's memory for good
    settings.queueing.idle_timeout = 0.5  # seconds; kopf keeps one task for each object that has changed
    for version, plural in labelled:
        group, _, version = version.rpartition("/")
        settings.watching.label_selectors[group, version, plural] = SERVICE_LABEL
    return settings


class NullStorage(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """Stores nothing: kopf's default would compare each object at each event, for handlers that do not exist here."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        pass

    def purge(self, **_: object) -> None:
        pass

    def touch(self, **_: object) -> None:
        pass


class RateLimitedLogFilter(logging.Filter):
    """Lets one warning per `every_s` seconds pass: in an outage a dozen watches would each log every retry."""

    def __init__(self, every_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._passed_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return False
        if is_due := self._clock() - self._passed_s >= self._every_s:
            self._passed_s = self._clock()
        return is_due


def reduce_kopf_logging() -> None:
    """Drop kopf's log line for each handled event, and limit the rate of those for failed requests."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    rate_limit = RateLimitedLogFilter()
    for name in ("watching", "fetching", "scanning"):
        logging.getLogger(f"kopf._cogs.clients.{name}").addFilter(rate_limit)
