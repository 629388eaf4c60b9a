"""`RouterReports`: what each router pod says of its replicas, from its `GET /state/events` (docs/reference/router.md).

One connection per router pod, opened when the pod is seen and closed when it is gone. Nothing is polled: whoever
depends on a router is told when its report changes; of its load alone, which never stands still, now and then.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from octavo_operator.observed import ModelSize, RouterReport

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name of a pod
Address = tuple[str, int]  # IP, port
SILENCE_S = 5.0  # a heartbeat comes every second
RETRY_S = 1.0
LOAD_EVERY_S = 15.0
LONGEST_LINE = 4 << 20  # bytes: the state of a thousand replicas


class RouterReports:
    """`on_change` is called with the pod's key whenever its report is another."""

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
        self._followers: dict[Key, tuple[Address, asyncio.Task[None]]] = {}
        self._reports: dict[Key, RouterReport] = {}

    def of(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        return {pod: report for pod in pods if (report := self._reports.get((namespace, pod))) is not None}

    def follow(self, key: Key, address: Address, secret: str = "") -> None:
        """Another address than before is another pod."""
        known = self._followers.get(key)
        if known is None or known[0] != address:
            self.forget(key)
            task = asyncio.create_task(self._keep_following(key, address, secret))
            self._followers[key] = (address, task)

    def forget(self, key: Key) -> None:
        if (known := self._followers.pop(key, None)) is not None:
            known[1].cancel()
        self._reports.pop(key, None)

    async def close(self) -> None:
        tasks = [task for _, task in self._followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_following(self, key: Key, address: Address, secret: str) -> None:
        host, port = address
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/state/events"
        while True:
            try:
                await self._follow_once(key, url, secret)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.info("router %s/%s can't be followed: %s", *key, error)
            if self._reports.pop(key, None) is not None:
                self._on_change(key)
            await asyncio.sleep(RETRY_S)

    async def _follow_once(self, key: Key, url: str, secret: str) -> None:
        headers = {"x-octavo-secret": secret} if secret else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        replicas: dict[str, Mapping[str, Any]] = {}
        told, told_s = None, float("-inf")
        async with self._session.get(url, headers=headers, timeout=timeout, read_bufsize=LONGEST_LINE) as answer:
            answer.raise_for_status()
            async for line in answer.content:  # at least one a second, be it a heartbeat
                if line.startswith(b"data:") and (heard := _heard(line[5:], key[1], replicas)) is not None:
                    self._reports[key] = heard
                report = self._reports.get(key)
                if report != told and (
                    told is None or report != _as_loaded(told, report) or self._clock() - told_s >= LOAD_EVERY_S
                ):
                    told, told_s = report, self._clock()
                    self._on_change(key)


def _as_loaded(told: RouterReport, now: RouterReport | None) -> RouterReport:
    """With the load of now."""
    if now is None:
        return told
    return replace(told, running=now.running, waiting=now.waiting, kv_usage=now.kv_usage)


def _heard(data: bytes, pod: str, replicas: dict[str, Mapping[str, Any]]) -> RouterReport | None:
    """None if it is nothing new. Raises ValueError for what a router of another version may say."""
    try:
        return report_of(pod, replicas.values()) if _take(json.loads(data), replicas) else None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it says what is not understood here: {error!r}") from error


def _take(event: Mapping[str, Any], replicas: dict[str, Mapping[str, Any]]) -> bool:
    """Whether it says something new."""
    match event.get("type"):
        case "state":
            replicas.clear()
            replicas.update({replica["name"]: replica for replica in event["state"]["replicas"]})
        case "change":
            replicas.update({replica["name"]: replica for replica in event.get("replicas", ())})
            for name in event.get("gone", ()):
                replicas.pop(name, None)
        case _:
            return False
    return True


def report_of(pod: str, replicas: Iterable[Mapping[str, Any]]) -> RouterReport:
    """Use of KV blocks counts those that running requests hold, not those that are only cached."""
    known = list(replicas)
    loads = [replica.get("load") or {} for replica in known]
    total = sum(load.get("total_blocks", 0) for load in loads)
    free = sum(load.get("free_blocks", 0) + load.get("cached_blocks", 0) for load in loads)
    return RouterReport(
        pod=pod,
        admitted={r["name"]: r["acknowledged_epoch"] for r in known if r.get("acknowledged_epoch")},
        sizes={r["name"]: _size_of(r["model"]) for r in known if r.get("model")},
        models=frozenset(model for replica in known for model in replica.get("models", ())),
        running=sum(load.get("running", 0) for load in loads),
        waiting=sum(load.get("waiting", 0) for load in loads),
        kv_usage=1 - free / total if total else None,
    )


def _size_of(model: Mapping[str, int]) -> ModelSize:
    """Fields that are unknown here are passed over."""
    return ModelSize(**{name: model[name] for name in ("max_model_len", "weights_bytes", "kv_bytes", "kv_tokens")})
