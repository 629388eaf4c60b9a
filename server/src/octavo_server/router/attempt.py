"""`Job` and `Attempt`: one request as it is sent on, and one replica's chance to answer it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_server.router.decision import Decision
    from octavo_server.router.exchange import Exchange
    from octavo_server.router.heads import Headers
    from octavo_server.router.prompt import Prompt
    from octavo_server.router.ticket import Ticket
    from octavo_server.router.track import Track
    from octavo_server.router.upstream import Origin


class Job:
    """`target` and `headers`: the client's. `more`: header lines that only a router may send."""

    __slots__ = ("body", "headers", "model", "more", "prompt", "target", "track", "without")

    def __init__(
        self,
        *,
        target: bytes,
        headers: "Headers",
        track: "Track",
        model: str,
        body: bytes,
        prompt: "Prompt",
        more: bytes,
        without: "Collection[bytes]",
    ) -> None:
        self.target = target
        self.headers = headers
        self.track = track
        self.model = model
        self.body = body
        self.prompt = prompt
        self.more = more
        self.without = without


class Attempt:
    """Sent, unless that needs a new connection first: then there is no `exchange` yet."""

    __slots__ = ("decision", "exchange", "origin", "request", "ticket")

    def __init__(
        self, decision: "Decision", ticket: "Ticket", origin: "Origin", request: bytes, exchange: "Exchange | None"
    ) -> None:
        self.decision = decision
        self.ticket = ticket
        self.origin = origin
        self.request = request
        self.exchange = exchange

    async def answered(self, limit_s: float) -> "Exchange":
        """The head of the answer is there. Raises ReplicaLost or ReplicaTimeout."""
        begun, self.exchange = self.exchange, None
        self.exchange = await self.origin.fetch(self.request, limit_s, begun)
        return self.exchange
