"""`Job` and `Attempt`: one request as it is sent on, and one replica's chance to answer it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.balance.ticket import Ticket
    from octavo_server.router.observe.request_observer import RequestObserver
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.upstream.connection import UpstreamResponse
    from octavo_server.router.upstream.headers import Headers
    from octavo_server.router.upstream.pool import ConnectionPool


class Job:
    """`target` and `headers`: the client's. `more`: header lines that only a router may send."""

    __slots__ = ("body", "headers", "model", "more", "prompt", "target", "track", "without")

    def __init__(
        self,
        *,
        target: bytes,
        headers: "Headers",
        track: "RequestObserver",
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
        self,
        decision: "Decision",
        ticket: "Ticket",
        origin: "ConnectionPool",
        request: bytes,
        exchange: "UpstreamResponse | None",
    ) -> None:
        self.decision = decision
        self.ticket = ticket
        self.origin = origin
        self.request = request
        self.exchange = exchange

    async def answered(self, limit_s: float) -> "UpstreamResponse":
        """The head of the answer is there. Raises ReplicaLost or ReplicaTimeout."""
        begun, self.exchange = self.exchange, None
        self.exchange = await self.origin.fetch(self.request, limit_s, begun)
        return self.exchange
