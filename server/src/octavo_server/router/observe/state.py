"""`RouterState`: replicas and waiting requests of one router, for `/state/events`, `/metrics` and `/debug`.

Numbers that may exceed 2^53 (epochs) are hexadecimal text, as many JSON parsers round them. `merged` combines the
states of several workers: a replica is admitted when every worker may send it requests, withdrawn when none may.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo_server.kv.frames import AdapterFile, ReplicaLoad
from octavo_server.router.balance.breaker import BREAKER_STATES, BreakerState
from octavo_server.router.fleet.endpoint import State

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import PrefixIndex
    from octavo_server.router.fleet.replica import Replica

#: States of a replica, from the worst to the best.
ORDER: tuple[State, ...] = ("gone", "connecting", "loading", "blind", "exact")


#: Measured size of an index entry: a hash and its place in a dictionary (benchmarks/prefix_index.py).
ENTRY_BYTES = 110


class IndexInfo(msgspec.Struct, kw_only=True, frozen=True):
    entries: int = 0
    max_entries: int = 0
    bytes: int = 0
    forgotten: int = 0


def index_info(index: "PrefixIndex") -> IndexInfo:
    return IndexInfo(
        entries=len(index),
        max_entries=index.max_entries,
        bytes=len(index) * ENTRY_BYTES,
        forgotten=index.num_dropped,
    )


class ModelSize(msgspec.Struct, kw_only=True, frozen=True):
    """`kv_tokens`: capacity of the KV cache in tokens."""

    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int


class ReplicaState(msgspec.Struct, kw_only=True, frozen=True):
    """`epoch`: the replica's latest. `acknowledged_epoch`: latest in which this router's copy of its blocks was exact.

    `worth_tokens`: prompt tokens that its cache saved lately and no other replica's cache could have saved. `model`:
    sizes of its model, once they are known. `revision`: version of its downloaded model, empty for local files.
    `adapters`: names of its loaded adapters. `adapter_file`: None if it follows no file of adapters.
    """

    name: str
    url: str
    state: State
    why: str = ""
    models: tuple[str, ...] = ()
    epoch: str | None = None
    acknowledged_epoch: str | None = None
    admitted: bool = False
    withdrawn: bool = True
    load: ReplicaLoad = msgspec.field(default_factory=ReplicaLoad)
    in_flight: int = 0
    blocks: int = 0
    worth_tokens: int = 0
    faults: int = 0
    breaker: BreakerState = "closed"
    model: ModelSize | None = None
    revision: str = ""
    startup_s: dict[str, float] = {}
    adapters: tuple[str, ...] = ()
    adapter_file: AdapterFile | None = None


class RouterState(msgspec.Struct, kw_only=True, frozen=True):
    """`models`: those that replicas report or the services file lists.

    Numbers of requests by model: those that wait for a replica with room (`queue`) or because their model has no
    replica (`held`), and those since the router's start that used the model (`requests`). `accepts`: the router accepts
    new requests; false while it drains or stops.
    """

    replicas: tuple[ReplicaState, ...] = ()
    models: tuple[str, ...] = ()
    queue: dict[str, int] = {}
    held: dict[str, int] = {}
    requests: dict[str, int] = {}
    workers: int = 1
    accepts: bool = True


def replica_state(replica: "Replica", now: float, breaker: BreakerState = "closed") -> ReplicaState:
    """`now`: time of the picker's clock."""
    blocks, hello, epoch = replica.blocks, replica.hello, replica.admitted_epoch
    is_admitted = replica.is_routable
    return ReplicaState(
        name=replica.name,
        url=replica.url,
        state=replica.state,
        why=replica.refusal or replica.why,
        models=tuple(sorted(replica.models)),
        epoch=None if hello is None else _hex(hello.epoch),
        acknowledged_epoch=None if epoch is None else _hex(epoch),
        admitted=is_admitted,
        withdrawn=not is_admitted,
        load=replica.load,
        in_flight=replica.num_in_flight,
        blocks=blocks.num_blocks if blocks is not None else 0,
        worth_tokens=round(replica.local_load.worth_tokens.at(now)),
        faults=replica.num_faults,
        breaker=breaker,
        model=_model_size(replica),
        revision="" if hello is None else hello.revision,
        startup_s={} if hello is None else hello.startup_s,
        adapters=tuple(sorted(replica.adapters)),
        adapter_file=replica.adapter_file,
    )


def _model_size(replica: "Replica") -> ModelSize | None:
    hello, num_blocks = replica.hello, replica.load.total_blocks
    if hello is None or not hello.weights_bytes or not num_blocks:
        return None
    return ModelSize(
        max_model_len=hello.max_model_len,
        weights_bytes=hello.weights_bytes,
        kv_bytes=hello.kv_bytes,
        kv_tokens=num_blocks * hello.block_size,
    )


def router_state(
    replicas: Iterable[ReplicaState],
    *,
    models: Iterable[str] | None = None,
    queue: Mapping[str, int] | None = None,
    held: Mapping[str, int] | None = None,
    requests: Mapping[str, int] | None = None,
    accepts: bool = True,
) -> RouterState:
    states = sorted(replicas, key=lambda state: state.name)
    return RouterState(
        replicas=tuple(states),
        models=tuple(sorted({model for state in states for model in state.models} if models is None else models)),
        queue=dict(queue or {}),
        held=dict(held or {}),
        requests=dict(requests or {}),
        accepts=accepts,
    )


def _hex(epoch: int) -> str:
    return f"{epoch:016x}"


def merged(states: Sequence[RouterState]) -> RouterState:
    if len(states) == 1:
        return states[0]
    by_name: dict[str, list[ReplicaState]] = {}
    for state in states:
        for replica in state.replicas:
            by_name.setdefault(replica.name, []).append(replica)
    return RouterState(
        replicas=tuple(_merged_replica(parts, len(states)) for _, parts in sorted(by_name.items())),
        models=tuple(sorted({model for state in states for model in state.models})),
        queue=_summed(state.queue for state in states),
        held=_summed(state.held for state in states),
        requests=_summed(state.requests for state in states),
        workers=sum(state.workers for state in states),
        accepts=all(state.accepts for state in states),
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _merged_replica(found: Sequence[ReplicaState], num_workers: int) -> ReplicaState:
    worst = min(found, key=lambda state: ORDER.index(state.state))
    is_known_to_all = len(found) == num_workers
    acknowledged = {state.acknowledged_epoch for state in found}
    return ReplicaState(
        name=worst.name,
        url=worst.url,
        state=worst.state,
        why=worst.why,
        models=worst.models,
        epoch=worst.epoch,
        acknowledged_epoch=acknowledged.pop() if is_known_to_all and len(acknowledged) == 1 else None,
        admitted=is_known_to_all and all(state.admitted for state in found),
        withdrawn=all(state.withdrawn for state in found),
        load=worst.load,
        in_flight=sum(state.in_flight for state in found),
        blocks=max(state.blocks for state in found),
        worth_tokens=sum(state.worth_tokens for state in found),
        faults=sum(state.faults for state in found),
        breaker=max((state.breaker for state in found), key=BREAKER_STATES.index),
        model=worst.model,
        revision=worst.revision,
        startup_s=worst.startup_s,
        adapters=worst.adapters,
        adapter_file=worst.adapter_file,
    )
