"""`ProxyRequest`: a client's request in the form in which it is forwarded to a replica."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_server.anthropic.routes import COUNT_TOKENS, MESSAGES, RENDER
from octavo_server.http.body import BodyReservation
from octavo_server.router.upstream.headers import Headers, request_head

if TYPE_CHECKING:
    from octavo_server.http.rate_limits import OwnRequest
    from octavo_server.router.observe.request_observer import RequestObserver
    from octavo_server.router.prompts.prompt import Prompt, RouteKind
    from octavo_server.router.proxy.sse import Dialect


#: Routes of requests with a prompt to hash -> kind of the prompt.
KINDS: "Mapping[str, RouteKind]" = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    MESSAGES: "messages",
    "/invocations": "invocation",
}
#: Kind of the prompt -> form of a stream's frames; other kinds have "chunks".
DIALECTS: "Mapping[RouteKind | None, Dialect]" = {"responses": "events", "messages": "messages"}
#: Routes whose requests no engine computes, so limits of tenants don't count them.
UNCOUNTED = frozenset(
    {"/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render"}
    | {"/v1/responses/input_tokens", RENDER, COUNT_TOKENS}
)
#: Routes whose requests are routed by model alone.
OTHERS = (
    UNCOUNTED
    | {"/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    | {"/v1/chat/completions/batch"}
)


@dataclass(slots=True, kw_only=True)
class ProxyRequest:
    """`target` and `headers` are the client's. `without`: names of headers that are not forwarded. `extra`: header
    lines that the router adds. `reservation`: the body's share of the memory budget.
    """

    target: bytes
    headers: Headers
    body: bytes
    model: str
    tenant: str
    weight: float
    admitted: "OwnRequest"
    prompt: "Prompt"
    observer: "RequestObserver"
    without: Collection[bytes]
    extra: bytes
    reservation: BodyReservation

    def encode_for(self, host: bytes) -> bytes:
        head = request_head(self.target, self.headers, host, len(self.body), without=self.without, extra=self.extra)
        return head + self.body

    def drop_body(self) -> None:
        """Free the body's memory. To be called once no retry can follow."""
        self.body = b""
        self.reservation.release()
