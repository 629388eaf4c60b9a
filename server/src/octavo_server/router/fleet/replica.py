"""`Replica`: one engine behind the router, as all parts of the router see it.

States: connecting (no stream, and no sign that it answers), loading (its snapshot is being read), exact (the index
equals its cache), blind (it answers, but its cache isn't known: its stream broke or is silent, or it is a server
without a KV stream, such as vLLM), gone (it left discovery; final). Only `KVStreamClient` changes the state.

A replica is admitted (gets requests) when the router has requested its model card, and the replica has been exact in
its epoch (since its engine started) or, if polled, answers. It stays admitted while it is blind in the same epoch.
"""

from collections.abc import Mapping

from octavo_server.kv.frames import AdapterFile, Hello, ReplicaLoad, TenantLoad
from octavo_server.router.fleet.block_mirror import BlockMirror
from octavo_server.router.fleet.endpoint import Endpoint, State
from octavo_server.router.fleet.local_load import LocalLoad

#: Reason for the state of a replica that was never reached.
NEW = "it is new"
NO_WORK = TenantLoad()


class Replica:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.is_exact = False  # stored beside `state`, as each decision reads it many times
        self.state = "connecting"
        self.why = NEW  # reason for the state
        self.is_silent = False  # it missed a heartbeat or a health check: gets requests only if there is no other
        self.is_unresponsive = False  # no response to several requests in a row: its host or process is gone or hangs
        self.num_faults = 0  # number of frames that broke its mirror
        self.blocks: BlockMirror | None = None  # None before the first connection and once the replica is gone
        self.hello: Hello | None = None  # the latest hello frame
        self.admitted_epoch: int | None = None  # epoch of the latest exact mirror
        self.models: frozenset[str] = frozenset()
        self.adapters: Mapping[str, str] = {}  # name -> hash of the content, "" if polled; not in `models`
        self.adapter_file: AdapterFile | None = None  # None if it follows no file of adapters
        self.lengths: Mapping[str, int] = {}  # model name -> longest context in tokens; of a polled replica
        self.is_described = True  # False while the router requests its model card
        self.refusal = ""  # reason why it gets no requests although it accepts them
        self.away_since_s: float | None = None  # start of the time without an answer, by the fleet's clock
        self.load = ReplicaLoad()
        self.tenants: dict[str, TenantLoad] = {}  # by name, as the KV stream of its present epoch reports them
        self.local_load = LocalLoad()

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

    def serves(self, model: str) -> bool:
        """Return True for a name of the base model or of a loaded adapter."""
        return model in self.models or model in self.adapters

    def max_model_len(self, model: str) -> int | None:
        """Longest context in tokens. None if it isn't known or the replica doesn't serve `model`."""
        if self.hello is None or not self.serves(model):
            return self.lengths.get(model)
        return self.hello.max_model_len

    def update_tenants(self, changed: Mapping[str, TenantLoad]) -> None:
        for name, load in changed.items():
            if load == NO_WORK:
                self.tenants.pop(name, None)
            else:
                self.tenants[name] = load

    @property
    def num_in_flight(self) -> int:
        """Number of this router's requests to the replica that haven't ended."""
        return self.local_load.num_in_flight

    @property
    def is_routable(self) -> bool:
        is_in_use = self.state in ("exact", "blind") and self.is_described and not self.refusal
        return is_in_use and self.load.accepts and self.endpoint.is_ready is not False
