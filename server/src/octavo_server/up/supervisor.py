"""`Supervisor`: starts the router and the replicas of a plan, restarts them, and stops them all.

The first replica starts alone, so that the others find its downloads, compiled kernels and measurements. A process that
ends after it has served is restarted with growing delays; one that can't start, or keeps ending, stops everything.

After a signal the router stops first, once its running requests have finished, then the replicas, which then have no
requests. A process that exceeds its time limit, or still runs at a second signal, is killed. All children have ended
when `run` returns.
"""

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import aiohttp

from octavo_server.up.child import Child, ChildSpec
from octavo_server.up.console import Console
from octavo_server.up.plan import Plan

logger = logging.getLogger("octavo.up")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_PATH = "/ready"
ALIVE_PATH = "/health"
#: Least and most delay before a restart, restarts in a row, and the time of serving after which the delay is reset.
LEAST_S, MOST_S = 1.0, 30.0
MAX_IN_A_ROW = 5
STABLE_S = 60.0
PROBE_PERIOD_S = 0.1
PROBE_TIMEOUT_S = 5.0
_ADMITTED = re.compile(r"^octavo_router_endpoints_admitted (\d+)", re.MULTILINE)


class RestartPolicy:
    """Decides whether and when a process that ended by itself is restarted. Pure, without a clock.

    Each delay is twice the previous delay. After a minute of serving the delay is reset: one crash a day is not a crash
    loop. A process that ended before it was ever ready is not restarted, as it would fail again.
    """

    def __init__(self) -> None:
        self.num_in_a_row = 0
        self.has_served = False

    def record_exit(self, *, served_s: float) -> float | None:
        """Return the seconds until the next start, or None to give up. `served_s`: seconds for which the process was
        ready before it ended; 0 if it never was."""
        self.has_served = self.has_served or served_s > 0
        if served_s >= STABLE_S:
            self.num_in_a_row = 0
        self.num_in_a_row += 1
        if not self.has_served or self.num_in_a_row > MAX_IN_A_ROW:
            return None
        return min(MOST_S, LEAST_S * 2.0 ** (self.num_in_a_row - 1))


class ChildFailed(Exception):
    """A process could not start or keeps ending; the message has its name and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpLimits:
    """Time limits: `start_s` until a process is ready, `admit_s` until the router has then admitted all replicas,
    `stop_s` for the router to stop and again for the replicas."""

    start_s: float = 1800.0
    admit_s: float = 60.0
    stop_s: float = 40.0


class Probe:
    """Polls the children: whether a server is ready, and how many replicas the router has admitted."""

    async def __aenter__(self) -> "Probe":
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def wait_ready(self, url: str, path: str) -> None:
        """Poll the path until its status is 200, without a time limit: the caller watches the process and cancels."""
        while (await self._get(url + path))[0] != 200:
            await asyncio.sleep(PROBE_PERIOD_S)

    async def wait_admitted(self, router_url: str, num_replicas: int) -> None:
        while True:
            admitted = _ADMITTED.search((await self._get(f"{router_url}/metrics"))[1])
            if admitted and int(admitted[1]) >= num_replicas:
                return
            await asyncio.sleep(PROBE_PERIOD_S)

    async def _get(self, url: str) -> tuple[int, str]:
        try:
            async with self._session.get(url) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""


class Supervisor:
    """Runs the processes of a plan. `on_serving` is called once, when the router has admitted every replica."""

    def __init__(self, plan: Plan, console: Console, limits: UpLimits, *, on_serving: Callable[[], None]) -> None:
        self._plan = plan
        self._console = console
        self._limits = limits
        self._on_serving = on_serving
        self._children: dict[str, Child] = {}
        self._ready = {spec.name: asyncio.Event() for spec in (plan.router, *plan.replicas)}
        self._signals: list[signal.Signals] = []
        self._stop_requested, self._kill_requested = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        """Run until stopped; return 0 after a signal, 1 after a failed process, 128 + signal after a second signal."""
        loop = asyncio.get_running_loop()
        for sig in SIGNALS:
            loop.add_signal_handler(sig, self._on_signal, sig)
        work, stop = asyncio.create_task(self._work()), asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            failure = _failure(work)
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            await self._end_all()
        if failure is not None:
            for line in str(failure).splitlines():
                logger.error("%s", line)
            return 1
        return 128 + self._signals[-1] if self._kill_requested.is_set() else 0

    def _on_signal(self, sig: signal.Signals) -> None:
        self._signals.append(sig)
        (self._kill_requested if self._stop_requested.is_set() else self._stop_requested).set()

    async def _work(self) -> None:
        """Start all processes and keep them running. Raises an exception group with each ChildFailed."""
        first, *others = self._plan.replicas
        async with Probe() as probe, asyncio.TaskGroup() as keepers:

            def keep(specs: Iterable[ChildSpec]) -> None:
                for spec in specs:
                    keepers.create_task(self._keep(spec, probe))

            keep([self._plan.router, first])
            await self._ready[first.name].wait()
            keep(others)
            for event in self._ready.values():
                await event.wait()
            await self._wait_admitted(probe)
            self._on_serving()

    async def _keep(self, spec: ChildSpec, probe: Probe) -> None:
        restart_policy, clock = RestartPolicy(), asyncio.get_running_loop().time
        while True:
            child = self._children[spec.name] = await Child.start(spec, self._console)
            ready_at_s = await self._wait_ready(child, probe)
            await asyncio.wait({child.ended})
            served_s = 0.0 if ready_at_s is None else clock() - ready_at_s
            wait_s = restart_policy.record_exit(served_s=served_s)
            if wait_s is None:
                raise ChildFailed(
                    _failure_report(child, "kept ending" if restart_policy.has_served else "could not start")
                )
            logger.error("%s %s; restarting it in %g s", spec.name, child.exit_description, wait_s)
            await asyncio.sleep(wait_s)

    async def _wait_ready(self, child: Child, probe: Probe) -> float | None:
        """Wait until the child is ready; return the time, or None if the child ended before."""
        path = (
            ALIVE_PATH if child.spec is self._plan.router else READY_PATH
        )  # the router is only ready once it has replicas
        asking = asyncio.create_task(probe.wait_ready(child.spec.url, path))
        try:
            await asyncio.wait({asking, child.ended}, timeout=self._limits.start_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        if child.ended.done():
            return None
        if not asking.done():
            raise ChildFailed(f"{child.spec.name} was not ready after {self._limits.start_s:g} s.")
        self._ready[child.spec.name].set()
        return asyncio.get_running_loop().time()

    async def _wait_admitted(self, probe: Probe) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.admit_s):
                await probe.wait_admitted(self._plan.router.url, len(self._plan.replicas))
                return
        raise ChildFailed(f"the router did not admit all replicas within {self._limits.admit_s:g} s.")

    async def _end_all(self) -> None:
        children = [child for child in self._children.values() if not child.ended.done()]
        if children and self._signals:
            logger.info("stopping: running requests may finish; a second signal stops at once")
        routers = [child for child in children if child.spec is self._plan.router]
        await self._end(routers)
        await self._end([child for child in children if child not in routers])

    def _end_signal(self, child: Child) -> signal.Signals:
        """Signal that stops a child: after Ctrl-C, SIGINT, which skips the shutdown delay, if the child is ready; else
        SIGTERM, as SIGINT makes a starting child fail."""
        is_ctrl_c = bool(self._signals) and self._signals[0] == signal.SIGINT
        return signal.SIGINT if is_ctrl_c and self._ready[child.spec.name].is_set() else signal.SIGTERM

    async def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.signal(self._end_signal(child))
        if not children:
            return
        ended, twice = asyncio.create_task(_ended(children)), asyncio.create_task(self._kill_requested.wait())
        await asyncio.wait((ended, twice), timeout=self._limits.stop_s, return_when=asyncio.FIRST_COMPLETED)
        twice.cancel()
        for child in children:
            if not child.ended.done() and not self._kill_requested.is_set():
                logger.warning("%s did not stop within %g s; killing it", child.spec.name, self._limits.stop_s)
            child.kill()
        await ended


async def _ended(children: Sequence[Child]) -> None:
    await asyncio.wait({child.ended for child in children})


def _failure(work: "asyncio.Task[None]") -> BaseException | None:
    """Return the first ChildFailed of the task `work`, None while it runs. Raises any other exception of the task."""
    if not work.done():
        return None
    error = work.exception()
    failures, others = error.split(ChildFailed) if isinstance(error, BaseExceptionGroup) else (None, error)
    if failures is None or others is not None:
        raise error or AssertionError("supervision ended without a failure")
    return failures.exceptions[0]


def _failure_report(child: Child, what: str) -> str:
    lines = "".join(f"\n  {line}" for line in child.last_lines)
    return f"{child.spec.name} {what}: it {child.exit_description}" + (f"; its last lines:{lines}" if lines else ".")
