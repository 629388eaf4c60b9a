"""`FrontedProtocol`: uvicorn's protocol behind a `Front`, which has the first look at what comes."""

import asyncio
from typing import Any, ClassVar, cast

from octavo_engine.log_format import REQUEST_ID
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from octavo_server.http.cork import Cork
from octavo_server.http.protocol import PatientProtocol
from octavo_server.http.whole import Front, Offer, Taken

#: In the state of a request's scope: the `Taken` that was handed over, if there is one.
TAKEN = "taken"


class FrontedProtocol(PatientProtocol):
    """`offer` is set by `fronted`, in a subclass."""

    offer: ClassVar[Offer]

    _front: Front
    _is_in_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._front = Front(self.offer, self, cast(Cork, self.transport), self.loop)
        transport.set_protocol(cast(asyncio.Protocol, self._front))

    def shutdown(self) -> None:
        self._front.let_go()
        if self._front.is_answering:
            self._front.is_last = True
        else:
            super().shutdown()

    def on_message_begin(self) -> None:
        self._is_in_request = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._is_in_request = False
        super().on_message_complete()

    @property
    def is_between_requests(self) -> bool:
        """Each that began has been answered."""
        return not self._is_in_request and (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def wait_no_more(self) -> None:
        """The next request has come, in another way."""
        self._expect(None)
        self._unset_keepalive_if_required()

    def go_on(self, request: bytes, taken: Taken, *, is_last: bool) -> None:
        """With what was taken; `TAKEN` tells the application."""
        self.data_received(request)
        self.scope["state"][TAKEN] = taken
        self.cycle.keep_alive = not is_last

    def log(self, path: bytes, request_id: str, status: int) -> None:
        """As uvicorn does."""
        scope: Any = {"client": self.client, "path": path.decode("ascii"), "query_string": b""}
        mark = REQUEST_ID.set(request_id)
        line = '%s - "%s %s HTTP/%s" %d'
        self.access_logger.info(line, get_client_addr(scope), "POST", get_path_with_query_string(scope), "1.1", status)
        REQUEST_ID.reset(mark)


def fronted(offer: Offer) -> type[FrontedProtocol]:
    return type("Protocol", (FrontedProtocol,), {"offer": offer})
