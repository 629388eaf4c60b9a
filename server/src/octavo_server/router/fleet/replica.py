"""`Replica`: one engine behind the router, as all parts of the router see it.

States: connecting (no stream, and it isn't known to answer), loading (the snapshot is on its way), exact (the index has
what it has), blind (it answers, but what it has isn't known: a stream that broke or fell silent, or a server without
one, such as vLLM), gone (discovery doesn't name it any more; final). The follower alone changes the state.

A replica is admitted when it is exact for the first time in an epoch (one without a stream: when it answers) and has
said, or couldn't, how its prompts are read; until then nothing is sent to it. What comes after may be of a lower rung,
but it is sent to.
"""

from collections.abc import Mapping
from typing import Literal

from octavo_server.kv.frames import Hello, Load
from octavo_server.router.fleet.block_mirror import BlockMirror
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.local_load import LocalLoad

State = Literal["connecting", "loading", "exact", "blind", "gone"]

#: Why one is connecting of which nothing was ever heard.
NEW = "it is new"


class Replica:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_exact = False  # which each decision asks again and again
        self.state = "connecting"
        self.why = NEW  # it is in this state
        self.is_silent = False  # it missed a heartbeat or a health check: sent to only where there is no other
        self.is_unresponsive = False  # no answer to several requests in a row: its host or process is gone or hangs
        self.num_faults = 0  # how often what it told couldn't be believed
        self.blocks: BlockMirror | None = None  # of the connection there is or will be; None for one that is gone
        self.hello: Hello | None = None  # the latest
        self.admitted_epoch: int | None = None  # of the latest copy that was exact
        self.models: frozenset[str] = frozenset()
        self.lengths: Mapping[str, int] = {}  # name -> context, where one without a stream tells
        self.is_described = True  # False while it is being asked how its prompts are read
        self.away_since_s: float | None = None  # since when it has not answered, by the fleet's clock
        self.load = Load()
        self.activity = LocalLoad()

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state: State = state
        self.is_exact = state == "exact"

    def max_model_len(self, model: str) -> int | None:
        """None where it isn't known, or another's model."""
        if self.hello is None or model not in self.models:
            return self.lengths.get(model)
        return self.hello.max_model_len

    @property
    def num_in_flight(self) -> int:
        """Requests that this router sent and that haven't ended."""
        return self.activity.num_in_flight

    @property
    def is_routable(self) -> bool:
        is_in_use = self.state in ("exact", "blind") and self.is_described
        return is_in_use and self.load.accepts and self.endpoint.is_ready is not False
