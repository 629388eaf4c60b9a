"""`Cork` sends what was written in one turn of the event loop together, and drops it if the connection has ended."""

import asyncio

import pytest
import uvloop
from octavo_server.http.timeout_protocol import Cork


async def write(*, is_aborted):
    """Write to a connection, which may have been aborted in the same turn. Return what the peer gets, and faults."""
    loop = asyncio.get_running_loop()
    faults = []
    loop.set_exception_handler(lambda _, context: faults.append(context))

    class Server(asyncio.Protocol):
        def connection_made(self, transport):
            cork = Cork(transport, loop, lambda: False)
            if is_aborted:
                transport.abort()
            cork.write(b"head ")
            cork.write(b"body")
            loop.call_soon(cork.close)

    async with await loop.create_server(Server, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await reader.read(), faults
        except ConnectionResetError:
            return b"", faults
        finally:
            writer.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(("is_aborted", "expected"), [(False, b"head body"), (True, b"")], ids=["open", "aborted"])
def test_bytes_for_an_aborted_connection_are_dropped(new_loop, is_aborted, expected):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        received, faults = runner.run(write(is_aborted=is_aborted))
    assert received == expected
    assert not faults
