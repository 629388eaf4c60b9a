"""`Wait`: a request that no replica takes now, and what it is told when it has waited in vain."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_server.router.proxy.forward import Forwarder


class Wait:
    """One request's time in the waiting room: all its turns together may take `max_hold_s`."""

    def __init__(self, forwarder: "Forwarder", model: str) -> None:
        self._forwarder = forwarder
        self._model = model
        self._until_s: float | None = None

    async def turn(self) -> None:
        """Returns at once where there is a place and nobody waits for it. Raises Overloaded or Unavailable."""
        forwarder, model, loop = self._forwarder, self._model, asyncio.get_running_loop()
        self._until_s = self._until_s or loop.time() + forwarder.limits.max_hold_s
        try:
            has_place = partial(_has_place, forwarder, model)
            await forwarder.room.wait(model, has_place, until_s=self._until_s, why=_why_none(forwarder, model))
        finally:
            loop.call_soon(forwarder.room.poke)  # the next one's turn, when this one has taken its place


def _has_place(forwarder: "Forwarder", model: str) -> bool:
    return bool(forwarder.candidates(model))


def _why_none(forwarder: "Forwarder", model: str) -> str:
    replicas, most = forwarder.fleet.routable(model), forwarder.limits.max_requests_per_replica
    if not replicas:
        return f"no replica of the model `{model}` takes requests now"
    why = f"all replicas of the model `{model}` are busy or failing"
    if most is None:
        return why
    num_full = sum(replica.num_in_flight >= most for replica in replicas)
    return f"{why}; busy: {num_full} of {len(replicas)}, the limit is {most} at once (--max-requests-per-replica)"
