"""`resolve_model`: which served model a request means, or whether that can't be decided yet. Pure.

Rules, in this order:
- A name that a replica reports is known, also while that replica doesn't answer: its request waits for the replica.
- Before any replica has reported a name, every request is pending: the first replicas still load.
- Another name is pending while a replica that hasn't reported yet may still serve it. A replica that has not answered
  for `MAX_AWAY_S` no longer counts. After that the name is unknown: a 404.
- A request without a name means the first model if all replicas serve the same models; else it is ambiguous.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from octavo_server.router.fleet.replica import Replica

#: Seconds without an answer after which a replica that never reported its models no longer delays a 404.
MAX_AWAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Known:
    """`model`: reported by a replica, which may be away now."""

    model: str


@dataclass(frozen=True, slots=True)
class Pending:
    """Resolve again when the fleet changes, and at `again_at_s` if that comes first. None: only a change helps."""

    again_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """No replica serves the model of that name: a 404. `models`: all reported names, sorted."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """The request names no model, and the replicas serve different ones: a 400. `models`: all names, sorted."""

    models: list[str]


Resolution = Known | Pending | Unknown | Ambiguous


def resolve_model(
    model: str | None, replicas: Collection[Replica], *, departed: Collection[str] = (), now_s: float
) -> Resolution:
    """`departed`: names that replicas reported which discovery dropped a short while ago."""
    models = reported_models(replicas)
    if model and (model in models or model in departed):
        return Known(model)
    if not models:
        return Pending()
    if model:
        again_at_s = _next_expiry_s(replicas, now_s)
        return Unknown(models) if again_at_s is None else Pending(again_at_s)
    if len({replica.models for replica in replicas if replica.models}) > 1:
        return Ambiguous(models)
    return Known(models[0])


def reported_models(replicas: Iterable[Replica]) -> list[str]:
    return sorted({model for replica in replicas for model in replica.models})


def _next_expiry_s(replicas: Iterable[Replica], now_s: float) -> float | None:
    """When the first replica that may still report its models stops counting. None if no such replica is left."""
    expiries = (
        replica.away_since_s + MAX_AWAY_S
        for replica in replicas
        if not replica.models and replica.away_since_s is not None
    )
    return min((expiry_s for expiry_s in expiries if expiry_s > now_s), default=None)
