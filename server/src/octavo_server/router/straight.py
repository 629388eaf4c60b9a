"""`Straight`: a request that goes the straight way: read, sent, and its answer written, by callbacks, without a task.

Most requests of a service that isn't streaming go like this, and every stream begins so. Only what is the same each
time is done here. What comes whole and has somebody to answer it is taken; whatever turns out otherwise (a stream, a
replica that fails, a client that doesn't read, a router that drains) is handed over to the `Proxy`, attempt and all.
It is counted once, here or there.
"""

import logging
from typing import TYPE_CHECKING

from octavo_server.openai.errors import Unauthorized
from octavo_server.router.caller import request_id_of
from octavo_server.router.prompt_estimate import estimate
from octavo_server.router.proxy import CLIENT_LEFT, INLINE_BYTES, KINDS, UNREAD, read_object, tenant_of

if TYPE_CHECKING:
    from octavo_server.http.whole import Front
    from octavo_server.router.attempt import Attempt, Job
    from octavo_server.router.heads import Headers
    from octavo_server.router.prompt_estimate import Kind
    from octavo_server.router.proxy import Proxy

logger = logging.getLogger(__name__)

_KINDS: "dict[bytes, Kind]" = {path.encode(): kind for path, kind in KINDS.items()}


class Straight:
    """States: sent, over (answered, left by its client, or handed over)."""

    __slots__ = (
        *("_connection", "_has_begun", "_is_over", "_proxy"),
        *("attempt", "body", "headers", "job", "kind", "path", "request_id"),
    )

    def __init__(self, proxy: "Proxy", connection: "Front", job: "Job", attempt: "Attempt") -> None:
        self.path = job.target
        self.headers = job.headers
        self.body = job.body
        self.kind = _KINDS.get(job.target)
        self.request_id = job.track.request_id
        self.job = job
        self.attempt = attempt
        self._proxy = proxy
        self._connection = connection
        self._has_begun = self._is_over = False

    def start(self) -> None:
        """Of one that is taken."""
        exchange = self.attempt.exchange
        self._proxy.lifecycle.enter()
        self._proxy.in_flight.add(self)
        if exchange is None:
            self._connection.loop.call_soon(self.hand_over)
        else:
            exchange.on_change = self._on_change

    def end(self, error: Exception) -> None:
        """The proxy hears of the error itself."""
        self.hand_over()

    def client_left(self) -> None:
        self._leave()
        self._proxy.forwarder.settle(self.attempt, is_ok=False, has_failed=False)
        self.job.track.ended(CLIENT_LEFT, "client left")
        logger.info("request %s: the client left, aborting", self.request_id)

    def _on_change(self) -> None:
        exchange = self.attempt.exchange
        assert exchange is not None
        if exchange.is_complete:
            self._answer_safely() if self._can_answer else self.hand_over()
        elif exchange.error is not None or exchange.is_held_up:
            self.hand_over()
        elif not self._has_begun:
            self._has_begun = True
            exchange.limit_s = self._proxy.settings.forward.idle_timeout_s
            if exchange.is_stream:
                self.hand_over()

    @property
    def _can_answer(self) -> bool:
        exchange = self.attempt.exchange
        assert exchange is not None
        is_usual = 200 <= exchange.status < 500 and exchange.status != 429
        return is_usual and self._proxy.lifecycle.state == "accepting" and not self._connection.is_behind

    def _answer_safely(self) -> None:
        try:
            self._answer()
        except Exception:  # the request boundary
            logger.exception("request %s failed", self.request_id)
            self._connection.transport.abort()

    def _answer(self) -> None:
        attempt, exchange, forwarder = self.attempt, self.attempt.exchange, self._proxy.forwarder
        assert exchange is not None
        out = forwarder.begin_answer(self.job, attempt, exchange)
        out.append((b"x-request-id", self.request_id.encode("latin-1")))
        self._leave()
        self._connection.answer(exchange.status, out, exchange.take())
        forwarder.settle(attempt, is_ok=True, has_failed=False)
        self.job.track.ended(exchange.status, "finished")

    def hand_over(self) -> None:
        """The proxy has it in flight from then on."""
        if not self._is_over:
            self._is_over = True
            if self.attempt.exchange is not None:
                self.attempt.exchange.on_change = None
            self._connection.hand_over()

    def _leave(self) -> None:
        self._is_over = True
        if self.attempt.exchange is not None:
            self.attempt.exchange.on_change = None
        self._proxy.in_flight.discard(self)
        self._proxy.lifecycle.leave()


def take_straight(proxy: "Proxy", connection: "Front", path: bytes, headers: "Headers", body: bytes) -> Straight | None:
    """None for what isn't taken; nothing was done about it then."""
    try:
        return _taken(proxy, connection, path, headers, body)
    except Exception:  # the request boundary: the proxy will meet it, too, and answer
        logger.exception("a request can't go the straight way")
        return None


def _taken(proxy: "Proxy", connection: "Front", path: bytes, headers: "Headers", body: bytes) -> Straight | None:
    if not body or len(body) > INLINE_BYTES or proxy.lifecycle.state != "accepting":
        return None
    try:
        tenant = "" if proxy.ring is None else tenant_of(headers, proxy.ring)
    except Unauthorized:
        return None
    track = proxy.telemetry.track(request_id_of(headers))
    asked, is_plain = read_object(body)
    model = asked.get("model")
    if not is_plain or not isinstance(model, str) or proxy.forwarder.room.is_asked_for(model):
        return None
    candidates = proxy.forwarder.candidates(model)
    if not candidates:
        return None
    track.model = model
    kind, reader = _KINDS.get(path), proxy.readers(model)
    prompt = UNREAD
    if kind is not None:
        prompt = estimate(kind, asked) if reader is None else reader.read(kind, asked, tenant)
    job = proxy.job(path, headers, body, tenant=tenant, track=track, model=model, prompt=prompt)
    straight = Straight(proxy, connection, job, proxy.forwarder.begin(job, candidates))
    straight.start()
    return straight
