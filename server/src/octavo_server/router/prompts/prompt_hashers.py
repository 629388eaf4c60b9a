"""`PromptHashers`: a `PromptHasher` for each model, built from the model cards of replicas (`GET /kv/model`).

The card of a replica is fetched when the replica begins a new epoch. Replicas with equal fingerprints share one hasher,
and so its warm caches. Cards are megabytes: if the streams of several replicas name the same fingerprint, one card is
fetched, however many replicas start at once. Without a fingerprint each replica's card is fetched, but equal cards
build one hasher. A replica without a card (no KV stream, another server) has no hasher: its prompts are estimated.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

import aiohttp
import msgspec
from octavo_engine.wire.errors import OctavoError

from octavo_server.kv.card import KVModelCard, read_card
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts.prompt_hasher import PromptHasher

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
#: Most bytes of a model card; the largest known tokenizer makes one of 40 MB.
MAX_CARD_BYTES = 64 * 2**20
AGAIN_S = 5.0

#: A replica accepts a request's tenant only with the router secret; all requests with one API key are one tenant.
MERGED_TENANTS = (
    "it isolates the caches of tenants (--cache-isolation), but without a router secret it treats all clients of this "
    "router as one tenant: give the same --router-secret to both, or start the replica without --cache-isolation"
)


class PromptHashers:
    """Belongs to one event loop, from `start` to `stop`. `merges_tenants`: replicas see one tenant for all clients."""

    def __init__(self, fleet: Fleet, headers: Callable[[], Mapping[str, str]], *, merges_tenants: bool = False) -> None:
        self._fleet = fleet
        self._merges_tenants = merges_tenants
        self._headers = headers
        self._epochs: dict[str, int] = {}  # replica name -> epoch for which its card was requested
        self._fingerprints: dict[str, str] = {}  # replica name -> fingerprint of its card
        self._hashers: dict[str, PromptHasher] = {}  # fingerprint -> hasher
        self._by_model: dict[str, PromptHasher | None] = {}
        self._adapters: dict[str, str] = {}  # name -> hash of its content
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.on_change.append(self._on_replica_change)

    async def start(self) -> None:
        # A compressed card could exceed the limit with its first bytes.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def hasher_for(self, model: str) -> PromptHasher | None:
        """Return the hasher of the model. If its replicas have different ones, the hasher of most routable replicas."""
        if model not in self._by_model:
            routable = self._fleet.routable(model)
            if not routable:  # not cached, as clients may send any name
                return None
            known = [self._fingerprints[r.name] for r in routable if r.name in self._fingerprints]
            self._by_model[model] = self._hashers[max(known, key=known.count)] if known else None
        return self._by_model[model]

    def adapter_for(self, model: str) -> str:
        """Return the hash of the adapter of this name: of most routable replicas that hold it; "" if none does."""
        if model not in self._adapters:
            adapters = [each for replica in self._fleet.routable(model) if (each := replica.adapters.get(model))]
            if not adapters:
                return ""
            self._adapters[model] = max(adapters, key=adapters.count)
        return self._adapters[model]

    def _on_replica_change(self, replica: Replica) -> None:
        self._by_model.clear()
        self._adapters.clear()
        if replica.state == "gone":
            self._epochs.pop(replica.name, None)
            self._fingerprints.pop(replica.name, None)
        elif replica.hello is not None and self._epochs.get(replica.name) != replica.hello.epoch:
            self._epochs[replica.name] = replica.hello.epoch
            replica.is_described, replica.refusal = False, ""
            task = asyncio.create_task(self._fetch_with_retries(replica, replica.hello.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fetch_with_retries(self, replica: Replica, epoch: int) -> None:
        while self._epochs.get(replica.name) == epoch:
            try:
                await self._update_hasher(replica)
                return
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.info("replica %s: its model card could not be fetched: %s", replica.name, error)
            except (OctavoError, msgspec.MsgspecError, RecursionError) as error:
                logger.warning("replica %s: unusable model card, prompts are only estimated: %s", replica.name, error)
                return
            finally:
                self._mark_described(replica)
            await asyncio.sleep(AGAIN_S)

    async def _update_hasher(self, replica: Replica) -> None:
        """Assign the replica a hasher. Raises OctavoError or MsgspecError if its card is needed and unusable."""
        fingerprint = replica.hello.card if replica.hello else ""
        async with self._lock("fetch", fingerprint or replica.name):
            if fingerprint not in self._hashers:
                card = await asyncio.to_thread(read_card, await self._card(replica))
                fingerprint = card.fingerprint
                await self._build_hasher(card)
        if replica.name in self._epochs:
            self._fingerprints[replica.name] = fingerprint
            if self._merges_tenants and self._hashers[fingerprint].card.cache_isolation:
                replica.refusal = MERGED_TENANTS
                logger.warning("replica %s gets no requests: %s", replica.name, replica.refusal)
                self._fleet.notify_change(replica)
        used = set(self._fingerprints.values())
        self._hashers = {name: hasher for name, hasher in self._hashers.items() if name in used}
        self._by_model.clear()

    async def _build_hasher(self, card: KVModelCard) -> None:
        async with self._lock("build", card.fingerprint):
            if card.fingerprint not in self._hashers:
                self._hashers[card.fingerprint] = await asyncio.to_thread(PromptHasher.from_card, card)

    def _lock(self, *key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _mark_described(self, replica: Replica) -> None:
        """Let requests go to the replica, whether its card could be fetched or not."""
        if not replica.is_described:
            replica.is_described = True
            self._fleet.notify_change(replica)

    async def _card(self, replica: Replica) -> bytes:
        """Raises OctavoError if the replica sends more than `MAX_CARD_BYTES`."""
        url = replica.url + "/kv/model"
        async with self._session.get(url, headers=self._headers(), allow_redirects=False) as answer:
            answer.raise_for_status()
            card = bytearray()
            async for data in answer.content.iter_any():
                card += data
                if len(card) > MAX_CARD_BYTES:
                    answer.close()
                    raise OctavoError(f"it has more than {MAX_CARD_BYTES} bytes, the limit")
            return bytes(card)
