"""`RouterReports`: the state of the replicas, from each router's `GET /state/events` (docs/reference/router.md).

There is one connection per router pod, and nothing is polled. `on_change` is called when a report changes; if only the
load has changed, which varies constantly, at most every `LOAD_EVERY_S` seconds.

Tenants choose the images of routers, so a router may send anything. It gets a limited share of the operator's event
loop, reconciles and memory, and its figures of pods that are not behind it are ignored.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from http import HTTPStatus

import aiohttp

from octavo_operator.cluster.router_state import Change, RouterState
from octavo_operator.observed import RouterReport

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name of a pod
Address = tuple[str, int]  # IP, port
SILENCE_S = 5.0  # a stream without data for so long has failed: routers send a heartbeat every second
RETRY_S, LAST_RETRY_S = 1.0, 60.0  # the delay doubles while a router sends invalid data
LOAD_EVERY_S = 15.0
CHANGES_BURST = 5  # changes that are published at once; then one a second, each with all changes so far
LONGEST_EVENT = 4 << 20  # bytes; enough for the state of a thousand replicas
MAX_EVENTS_S = 50  # routers send a change every 0.2 s, and urgent ones at most every 25 ms
BURST_S = 10.0  # events that arrived while the operator did something else are read at once
#: Size of an event, and more for each engine pod behind the router. A larger event counts as several.
EVENT_BYTES, POD_BYTES = 16 << 10, 4 << 10
OBJECT_BYTES = 256  # size of a JSON object, if it is smaller: small ones take time, too
FRESH_S = 3.0  # a router that was silent for longer may have missed changes: it sends a heartbeat every second


def router_session() -> aiohttp.ClientSession:
    """Make the session for `RouterReports`: one connection per router, and no decompression of received data."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)


class RouterReports:
    """The latest report of each router pod. `on_change`: called with the pod's key when its report has changed.

    `session`: a `router_session`. `engines_of`: names of the engine pods that are behind the router of a router pod; a
    report has only these.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        on_change: Callable[[Key], None],
        *,
        engines_of: Callable[[Key], Set[str]],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._on_change = on_change
        self._engines_of = engines_of
        self._clock = clock
        self._pause = pause
        self._streams: dict[Key, tuple[Address, asyncio.Task[None]]] = {}
        self._states: dict[Key, RouterState] = {}
        self._received_s: dict[Key, float] = {}

    def for_pods(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        states = {pod: state for pod in pods if (state := self._states.get((namespace, pod))) is not None}
        return {pod: state.report(self._engines_of((namespace, pod))) for pod, state in states.items()}

    def fresh(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        """The reports of those pods that sent a line in the last `FRESH_S` seconds."""
        now_s = self._clock()
        reports = self.for_pods(namespace, pods)
        return {pod: report for pod, report in reports.items() if now_s - self._received_s[namespace, pod] <= FRESH_S}

    def subscribe(self, key: Key, address: Address, secrets: Sequence[str] = ("",)) -> None:
        """Connect to a router pod. A new address replaces the connection: it is another pod with the same name.
        `secrets`: a router that answers 401 to one of them is sent the next one; an empty one is not sent."""
        stream = self._streams.get(key)
        if stream is None or stream[0] != address:
            self.unsubscribe(key)
            task = asyncio.create_task(self._run_stream(key, address, secrets))
            self._streams[key] = (address, task)

    def unsubscribe(self, key: Key) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            stream[1].cancel()
        self._states.pop(key, None)
        self._received_s.pop(key, None)

    async def aclose(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_stream(self, key: Key, address: Address, secrets: Sequence[str]) -> None:
        (host, port), in_turn = address, deque(secrets)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/state/events"
        budget, publishing, refused_s = EventBudget(self._clock()), PublishingLimit(self._clock()), RETRY_S
        while True:
            began_s, retry_s = self._clock(), RETRY_S
            try:
                await self._stream_once(key, url, in_turn[0], budget, publishing)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.info("the state stream of router %s/%s failed: %.200s", *key, error)
                if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
                    in_turn.rotate(-1)
            except ValueError as error:
                if self._clock() - began_s >= LAST_RETRY_S:
                    refused_s = RETRY_S
                if refused_s == RETRY_S:
                    logger.warning(_REFUSED, *key, error, LAST_RETRY_S)
                retry_s, refused_s = refused_s, min(2 * refused_s, LAST_RETRY_S)
            if self._states.pop(key, None) is not None:
                self._on_change(key)
            await self._pause(retry_s)

    async def _stream_once(
        self, key: Key, url: str, secret: str, budget: "EventBudget", publishing: "PublishingLimit"
    ) -> None:
        """Read one stream to its end. Raises ValueError if the router sends something else or too much."""
        headers = {"Accept-Encoding": "identity"} | ({"x-octavo-secret": secret} if secret else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        state, pending, changes = RouterState(key[1]), bytearray(), set[Change]()
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
            answer.raise_for_status()
            if answer.status != 200:
                raise ValueError(f"its answer has the status {answer.status}, not 200")
            while chunk := await answer.content.readany():  # `readline` needs quadratic time for tiny pieces
                pending += chunk
                for event in split_events(pending, len(chunk)):
                    now_s = self._received_s[key] = self._clock()
                    budget.spend(event, num_pods=len(self._engines_of(key)), now_s=now_s)
                    changed = state.update(event[5:], now_s) if event.startswith(b"data:") else None
                    if changed is not None:
                        self._states[key] = state
                        changes.add(changed)
                    if publishing.allows(changes, now_s):
                        changes.clear()
                        self._on_change(key)


_REFUSED = (
    "the state stream of router %s/%s was closed: %s. Until it is read again, after up to %g s, new replicas "
    "behind the router are not admitted"
)


def split_events(pending: bytearray, num_new: int) -> Iterator[bytes]:
    """Remove the events that are whole from a stream's bytes and return them. `num_new`: bytes since the last call."""
    searched = max(0, len(pending) - num_new - 1)
    while (end := pending.find(b"\n\n", searched)) >= 0:
        event = bytes(pending[:end])
        del pending[: end + 2]
        searched = 0
        yield event
    if len(pending) > LONGEST_EVENT:
        raise ValueError(f"one of its events has more than {LONGEST_EVENT} bytes")


class EventBudget:
    """Events that a router may send: `MAX_EVENTS_S` a second, on average over `BURST_S` seconds."""

    def __init__(self, now_s: float) -> None:
        self._left = MAX_EVENTS_S * BURST_S
        self._at_s = now_s

    def spend(self, event: bytes, *, num_pods: int, now_s: float) -> None:
        """Count an event. `num_pods`: number of engine pods behind the router. Raises ValueError beyond the budget."""
        earned, self._at_s = (now_s - self._at_s) * MAX_EVENTS_S, now_s
        num_bytes, limit = len(event) + event.count(b"{") * OBJECT_BYTES, EVENT_BYTES + num_pods * POD_BYTES
        self._left = min(self._left + earned, MAX_EVENTS_S * BURST_S) - 1 - num_bytes // limit
        if self._left < 0:
            raise ValueError(f"it sends more than {MAX_EVENTS_S} events a second (of up to {limit} bytes each)")


class PublishingLimit:
    """Publications for a router: changes of replicas, and changes of held requests, up to `CHANGES_BURST` at once and
    one a second on average; changes of numbers alone every `LOAD_EVERY_S`."""

    def __init__(self, now_s: float) -> None:
        self._left: dict[Change, float] = {"held": CHANGES_BURST, "replicas": CHANGES_BURST}
        self._at_s, self._published_s = now_s, float("-inf")

    def allows(self, changes: Set[Change], now_s: float) -> bool:
        """Return whether changes that are not yet published may be published now, and count that."""
        self._left = {kind: min(left + now_s - self._at_s, CHANGES_BURST) for kind, left in self._left.items()}
        self._at_s = now_s
        kind = next((kind for kind, left in self._left.items() if kind in changes and left >= 1), None)
        if not changes or (kind is None and now_s - self._published_s < LOAD_EVERY_S):
            return False
        if kind is not None:
            self._left[kind] -= 1
        self._published_s = now_s
        return True
