"""`run_until_disconnect`: work for a client that ends when the client leaves."""

import asyncio

from starlette.types import Receive


async def run_until_disconnect(work: "asyncio.Task[None]", receive: Receive) -> bool:
    """True if the work has ended, False if the client left first and the work was cancelled. Raises nothing of it."""
    client = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({work, client}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        work.cancel()
        client.cancel()
        await asyncio.gather(work, client, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
