"""`RouterState`: what one router knows of its replicas and of who waits, for `/state/events`, `/metrics` and `/debug`.

Numbers that may exceed 2^53 (epochs) are hexadecimal text, so that any JSON reader keeps them. What several workers
know is made one by `merged`: a replica is admitted when every worker sends to it, withdrawn when none does.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo_server.kv.frames import Load
from octavo_server.router.replica import State

if TYPE_CHECKING:
    from octavo_server.router.replica import Replica

#: From the worst to the best.
ORDER: tuple[State, ...] = ("gone", "connecting", "loading", "blind", "exact")


class ReplicaState(msgspec.Struct, kw_only=True, frozen=True):
    """`epoch`: of the stream that is connected. `acknowledged_epoch`: the one whose whole snapshot this router has."""

    name: str
    url: str
    state: State
    models: tuple[str, ...] = ()
    epoch: str | None = None
    acknowledged_epoch: str | None = None
    admitted: bool = False
    withdrawn: bool = True
    load: Load = msgspec.field(default_factory=Load)
    in_flight: int = 0
    blocks: int = 0
    worth_tokens: int = 0


class RouterState(msgspec.Struct, kw_only=True, frozen=True):
    """`queue`: requests waiting for a replica to have room. `held`: model -> requests waiting for its first replica."""

    replicas: tuple[ReplicaState, ...] = ()
    models: tuple[str, ...] = ()
    queue: int = 0
    held: dict[str, int] = {}
    workers: int = 1


def replica_state(replica: "Replica", *, is_admitted: bool) -> ReplicaState:
    blocks = replica.blocks
    hello = blocks.hello if blocks is not None else None
    epoch = None if hello is None else f"{hello.epoch:016x}"
    return ReplicaState(
        name=replica.name,
        url=replica.endpoint.url,
        state=replica.state,
        models=tuple(sorted(replica.models)),
        epoch=epoch,
        acknowledged_epoch=epoch if replica.is_exact else None,
        admitted=is_admitted,
        withdrawn=not is_admitted,
        load=replica.load,
        in_flight=replica.num_in_flight,
        blocks=blocks.num_blocks if blocks is not None else 0,
    )


def router_state(
    replicas: Collection["Replica"], admitted: Collection["Replica"], *, queue: int = 0, held: Mapping[str, int] = {}
) -> RouterState:
    states = [replica_state(replica, is_admitted=replica in admitted) for replica in replicas]
    return RouterState(
        replicas=tuple(sorted(states, key=lambda state: state.name)),
        models=tuple(sorted({model for replica in replicas for model in replica.models})),
        queue=queue,
        held=dict(held),
    )


def merged(states: Sequence[RouterState]) -> RouterState:
    """Of the workers of one router."""
    if len(states) == 1:
        return states[0]
    by_name: dict[str, list[ReplicaState]] = {}
    held: dict[str, int] = {}
    for state in states:
        for replica in state.replicas:
            by_name.setdefault(replica.name, []).append(replica)
        for model, waiting in state.held.items():
            held[model] = held.get(model, 0) + waiting
    return RouterState(
        replicas=tuple(_merged_replica(found, len(states)) for _, found in sorted(by_name.items())),
        models=tuple(sorted({model for state in states for model in state.models})),
        queue=sum(state.queue for state in states),
        held=held,
        workers=sum(state.workers for state in states),
    )


def _merged_replica(found: Sequence[ReplicaState], num_workers: int) -> ReplicaState:
    worst = min(found, key=lambda state: ORDER.index(state.state))
    is_known_to_all = len(found) == num_workers
    acknowledged = {state.acknowledged_epoch for state in found}
    return ReplicaState(
        name=worst.name,
        url=worst.url,
        state=worst.state,
        models=worst.models,
        epoch=worst.epoch,
        acknowledged_epoch=acknowledged.pop() if is_known_to_all and len(acknowledged) == 1 else None,
        admitted=is_known_to_all and all(state.admitted for state in found),
        withdrawn=all(state.withdrawn for state in found),
        load=worst.load,
        in_flight=sum(state.in_flight for state in found),
        blocks=max(state.blocks for state in found),
        worth_tokens=sum(state.worth_tokens for state in found),
    )
