"""Relays a replica's response to the client.

An event stream is relayed frame by frame. Any other response is sent when it is complete, so that another replica can
still serve the request until then; a response that outgrows its buffer is relayed as it arrives.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo_server.router.proxy.sse import SSEFramer
from octavo_server.router.upstream.headers import Headers, response_headers, value_of

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.proxy.downstream import Downstream
    from octavo_server.router.upstream.connection import UpstreamResponse

#: Without this header, nginx in front of the router would buffer a stream.
UNBUFFERED = (b"x-accel-buffering", b"no")
CACHED_TOKENS = b"x-octavo-cached-tokens"


def cached_tokens(response: "UpstreamResponse") -> int | None:
    """Prompt tokens that the replica found in its cache, from its response header; None without it."""
    value = value_of(response.headers, CACHED_TOKENS)
    return int(value) if value.isdigit() else None


def client_headers(response: "UpstreamResponse", decision: "Decision", *, has_routing: bool) -> Headers:
    """`has_routing`: add headers that show how the request was routed, and keep the replica's `x-octavo-*` headers."""
    whole_bytes = response.num_waiting_bytes if response.is_complete else None
    headers = response_headers(response.status, response.headers, whole_bytes=whole_bytes, keeps_own=has_routing)
    if has_routing:
        headers.append((b"x-octavo-rung", decision.rung.encode()))
        headers.append((b"x-octavo-replica", decision.chosen.name.encode("latin-1", "replace")))
    if response.is_stream and not value_of(response.headers, UNBUFFERED[0]):
        headers.append(UNBUFFERED)
    return headers


async def relay(
    response: "UpstreamResponse", headers: Headers, downstream: "Downstream", on_end: Callable[[], None]
) -> None:
    """Send the whole response to the client. Raises ReplicaLost or ReplicaTimeout if the upstream response fails.

    `on_end`: called before the last bytes or event are sent, as the client may then send its next request.
    """
    if response.is_stream and not value_of(response.headers, b"content-encoding"):
        downstream.framer = SSEFramer(downstream.dialect)
    whole = response.take_chunks() if response.is_complete else None
    await downstream.start(response.status, headers)
    if whole is not None:
        on_end()
        await downstream.finish(whole)
    else:
        await _relay_chunks(response, downstream, on_end)


async def _relay_chunks(response: "UpstreamResponse", downstream: "Downstream", on_end: Callable[[], None]) -> None:
    framer = downstream.framer
    while True:
        data = await response.next_chunk()
        is_complete = response.is_complete
        if framer is not None:
            data = framer.feed(data)
        if is_complete or (framer is not None and framer.has_ended):
            on_end()
        if is_complete:
            await downstream.finish(data if framer is None else data + framer.rest())
            return
        if data:
            await downstream.write(data)
