"""`RouterReports`: the state of the replicas, from each router's `GET /state/events` (docs/reference/router.md).

There is one connection per router pod, and nothing is polled. `on_change` is called when a report changes; if only the
load has changed, which varies constantly, at most every `LOAD_EVERY_S` seconds.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from octavo_operator.observed import ENGINE_PHASES, Load, ModelSize, RouterReport

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name of a pod
Address = tuple[str, int]  # IP, port
SILENCE_S = 5.0  # a stream without data for so long has failed: routers send a heartbeat every second
RETRY_S = 1.0
LOAD_EVERY_S = 15.0
LONGEST_LINE = 4 << 20  # bytes; enough for the state of a thousand replicas
MOST_STARTUP_S = 7 * 86400  # the status has it as an integer
FRESH_S = 3.0  # a router that was silent for longer may have missed changes: it sends a heartbeat every second


class RouterReports:
    """The latest report of each router pod. `on_change`: called with the pod's key when its report has changed."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        on_change: Callable[[Key], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._on_change = on_change
        self._clock = clock
        self._streams: dict[Key, tuple[Address, asyncio.Task[None]]] = {}
        self._reports: dict[Key, RouterReport] = {}
        self._received_s: dict[Key, float] = {}

    def for_pods(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        return {pod: report for pod in pods if (report := self._reports.get((namespace, pod))) is not None}

    def fresh(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        """The reports of those pods that sent a line in the last `FRESH_S` seconds."""
        now_s = self._clock()
        found = self.for_pods(namespace, pods)
        return {pod: report for pod, report in found.items() if now_s - self._received_s[namespace, pod] <= FRESH_S}

    def subscribe(self, key: Key, address: Address, secret: str = "") -> None:
        """Connect to a router pod. A new address replaces the connection: it is another pod with the same name."""
        stream = self._streams.get(key)
        if stream is None or stream[0] != address:
            self.unsubscribe(key)
            task = asyncio.create_task(self._run_stream(key, address, secret))
            self._streams[key] = (address, task)

    def unsubscribe(self, key: Key) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            stream[1].cancel()
        self._reports.pop(key, None)
        self._received_s.pop(key, None)

    async def aclose(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_stream(self, key: Key, address: Address, secret: str) -> None:
        host, port = address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/state/events"
        while True:
            try:
                await self._stream_once(key, url, secret)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.info("the state stream of router %s/%s failed: %s", *key, error)
            if self._reports.pop(key, None) is not None:
                self._on_change(key)
            await asyncio.sleep(RETRY_S)

    async def _stream_once(self, key: Key, url: str, secret: str) -> None:
        headers = {"x-octavo-secret": secret} if secret else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        state, published, published_s = RouterState(key[1]), None, float("-inf")
        async with self._session.get(url, headers=headers, timeout=timeout, read_bufsize=LONGEST_LINE) as answer:
            answer.raise_for_status()
            async for line in answer.content:  # a heartbeat, if nothing else, arrives every second
                now_s = self._received_s[key] = self._clock()
                if line.startswith(b"data:") and (changed := state.update(line[5:], now_s)) is not None:
                    self._reports[key] = changed
                report = self._reports.get(key)
                if report != published and (
                    published is None
                    or report is None
                    or _without_numbers(report) != _without_numbers(published)
                    or now_s - published_s >= LOAD_EVERY_S
                ):
                    published, published_s = report, now_s
                    self._on_change(key)


def _without_numbers(report: RouterReport) -> RouterReport:
    """The report without what varies constantly; of the models with held requests, only their names stay."""
    nothing: dict[str, Any] = {}
    held = dict.fromkeys((model for model, count in report.held.items() if count), 1)
    return replace(
        report, loads=nothing, load_times=nothing, in_flight=nothing, queue=nothing, requests=nothing, held=held
    )


class RouterState:
    """The state of one router pod, kept up to date by the events of its stream."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._start = ""
        self._replicas: dict[str, Mapping[str, Any]] = {}
        self._load_times: dict[str, float] = {}
        self._numbers: dict[str, Mapping[str, int]] = {"queue": {}, "held": {}, "requests": {}}

    def update(self, data: bytes, now_s: float) -> RouterReport | None:
        """Apply an event; return the new report, or None if nothing changed. `now_s`: monotonic time.

        Raises ValueError for an unknown format, as of a router of another version.
        """
        try:
            return self._report() if self._update(json.loads(data), now_s) else None
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the router's state has an unknown format: {error!r}") from error

    def _update(self, event: Mapping[str, Any], now_s: float) -> bool:
        match event.get("type"):
            case "state":
                changed, replicas = event["state"], event["state"]["replicas"]
                self._replicas.clear()
                self._start = event.get("router", "")
            case "change":
                changed, replicas = event, event.get("replicas", ())
                for name in event.get("gone", ()):
                    self._replicas.pop(name, None)
            case _:
                return False
        for replica in replicas:
            name, before = replica["name"], self._replicas.get(replica["name"], {})
            if before.get("load") != replica.get("load"):
                self._load_times[name] = now_s
            self._replicas[name] = replica
        self._numbers |= {name: changed[name] for name in self._numbers if changed.get(name) is not None}
        return True

    def _report(self) -> RouterReport:
        known = self._replicas.values()
        return RouterReport(
            pod=self._pod,
            start=self._start,
            admitted={r["name"]: r["acknowledged_epoch"] for r in known if r.get("acknowledged_epoch")},
            sizes={r["name"]: _size_of(r["model"]) for r in known if r.get("model")},
            revisions={r["name"]: r["revision"] for r in known if r.get("revision")},
            startups={r["name"]: _startup_of(r.get("startup_s") or {}) for r in known},
            loads={r["name"]: _load_of(r.get("load") or {}) for r in known},
            load_times={r["name"]: self._load_times.get(r["name"], 0.0) for r in known},
            in_flight={r["name"]: r.get("in_flight", 0) for r in known},
            models=frozenset(model for replica in known for model in replica.get("models", ())),
            **self._numbers,
        )


def _startup_of(given: Mapping[str, Any]) -> dict[str, float]:
    """The phases that the status has fields for: an engine of another version may report others, or nonsense."""
    numbers = {phase: given[phase] for phase in ENGINE_PHASES if isinstance(given.get(phase), int | float)}
    return {phase: seconds for phase, seconds in numbers.items() if 0 <= seconds <= MOST_STARTUP_S}


def _load_of(load: Mapping[str, int]) -> Load:
    total = load.get("total_blocks", 0)
    return Load(
        running=load.get("running", 0),
        waiting=load.get("waiting", 0),
        num_blocks=total,
        num_used_blocks=total - load.get("free_blocks", 0) - load.get("cached_blocks", 0),
    )


def _size_of(model: Mapping[str, int]) -> ModelSize:
    """Sizes of a replica's model; fields that this operator does not have are ignored."""
    return ModelSize(**{name: model[name] for name in ("max_model_len", "weights_bytes", "kv_bytes", "kv_tokens")})
