"""`Watches`: kopf, run so that it never gives up: not when the API server is away for an hour, nor when a kind is gone.

kopf's own way is to end the process after some failures, and to wait longer and longer before them. Here each request
is tried for ever at short intervals, so that a server that returns is followed at once; and whatever still ends kopf
is said, and it is started again over the same view.
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

#: group and version, plural
Resource = tuple[str, str]
FIRST_PAUSES_S, PAUSE_S = (0.1, 0.3, 0.5, 1.0), 2.0
RESTART_S = 5.0
LOG_INTERVAL_S = 30.0
END_S = 10.0


class RetryForever:
    """Pauses between tries of one request, without end. kopf goes through it anew for each request."""

    def __iter__(self) -> Iterator[float]:
        return chain(FIRST_PAUSES_S, repeat(PAUSE_S))


class KopfRunner:
    """`labelled`: the kinds of which only our own children are asked for. `on_signal`: called when the process is restarted
    to end; `on_end`: when nothing is watched, until it is again.
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
        """Until it is cancelled."""
        while True:
            try:
                await self._run_once()
            except Exception as error:  # noqa: BLE001 - the supervisor: whatever it was, watching goes on
                logger.warning("watching is started again: %s", error or type(error).__name__)
            self._on_end()
            await asyncio.sleep(RESTART_S)

    async def _run_once(self) -> None:
        self._restart.clear()
        restarted = asyncio.create_task(self._restart.wait())
        tasks = [
            *await kopf.spawn_tasks(
                registry=self._registry,
                settings=kopf_settings(self._labelled),
                standalone=True,
                namespaces=self._namespaces,
                clusterwide=not self._namespaces,
            ),
            restarted,
        ]
        for number in (signal.SIGINT, signal.SIGTERM):  # kopf has taken them
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=END_S)
        for task in done - {restarted}:
            task.result()


def kopf_settings(labelled: Sequence[Resource]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = settings.persistence.progress_storage = NullStorage()
    settings.process.ultimate_exiting_timeout = None  # it would kill us long after a restart of its own
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = RetryForever()
    settings.watching.server_timeout = 300
    settings.watching.chunk_size = 100  # a list of thousands in one would double our memory, for good
    settings.queueing.idle_timeout = 0.5  # of a task for each object that has changed
    for version, plural in labelled:
        group, _, version = version.rpartition("/")
        settings.watching.label_selectors[group, version, plural] = SERVICE_LABEL
    return settings


class NullStorage(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """kopf would work out for each event what of the object has changed since, for handlers that we don't have."""

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
    """Lets one message through in a while: of an outage, each of a dozen watches would tell again and again."""

    def __init__(self, every_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._told_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return False
        if is_due := self._clock() - self._told_s >= self._every_s:
            self._told_s = self._clock()
        return is_due


def reduce_kopf_logging() -> None:
    """It says of each event that it was handled, and of each try of each watch that it failed."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    often = RateLimitedLogFilter()
    for name in ("watching", "fetching", "scanning"):
        logging.getLogger(f"kopf._cogs.clients.{name}").addFilter(often)
