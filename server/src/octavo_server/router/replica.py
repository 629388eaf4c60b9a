"""`Replica`: one engine behind the router, as all parts of the router see it.

States: connecting (no stream, and it isn't known to answer), loading (the snapshot is on its way), exact (the index has
what it has), blind (it answers, but what it has isn't known: a stream that broke, or a server without one, such as
vLLM), gone (discovery doesn't name it any more; final). The follower alone changes the state.
"""

from typing import Literal

from octavo_server.kv.frames import Load
from octavo_server.router.activity import Activity
from octavo_server.router.endpoint import Endpoint
from octavo_server.router.replica_blocks import ReplicaBlocks

State = Literal["connecting", "loading", "exact", "blind", "gone"]


class Replica:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.state: State = "connecting"
        self.blocks: ReplicaBlocks | None = None  # of the connection there is, while it isn't broken
        self.models: frozenset[str] = frozenset()
        self.load = Load()
        self.activity = Activity()

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def is_exact(self) -> bool:
        return self.state == "exact"

    @property
    def num_in_flight(self) -> int:
        """Requests that this router sent and that haven't ended."""
        return self.activity.num_in_flight
