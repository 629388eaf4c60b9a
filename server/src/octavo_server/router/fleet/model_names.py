"""`resolve_model` finds the served model for the name in a request, or finds that it is too early to decide. Pure.

Rules, in this order:
- A name that a replica has reported is known, even while that replica doesn't answer: the request waits for it.
- Before any replica has reported a name, every request is pending: the first replicas still load.
- Any other name is pending while a replica that hasn't reported its models may still serve it. A replica that has not
  answered for `MAX_AWAY_S` no longer counts. Otherwise the name is unknown: a 404.
- A request without a name gets the first model if all replicas serve the same models, even with other adapters; else it
  is ambiguous.
- With a list of the router's services, nothing is pending: their names are known, even without a replica, and names
  that neither the list nor a replica has are unknown at once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo_server.router.fleet.listed_services import Service
from octavo_server.router.fleet.replica import Replica

#: Seconds without an answer after which a replica that never reported its models no longer delays a 404.
MAX_AWAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Known:
    """`model`: name that a replica reported; the replica may not answer now."""

    model: str


@dataclass(frozen=True, slots=True)
class Pending:
    """Too early to decide: resolve again when the fleet changes, or at `again_at_s` if that comes first."""

    again_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """No replica serves a model of that name: a 404. `models`: all reported names, sorted."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """The request names no model, and the replicas serve different ones: a 400. `models`: all names, sorted."""

    models: list[str]


Resolution = Known | Pending | Unknown | Ambiguous


def resolve_model(
    model: str | None,
    replicas: Collection[Replica],
    *,
    departed: Collection[str] = (),
    listed: Sequence[Service] | None = None,
    now_s: float,
) -> Resolution:
    """`departed`: names reported by replicas that recently left discovery. `listed`: all services behind the router."""
    if listed is not None:
        return _resolve_listed(model, replicas, departed, listed)
    models, names = reported_models(replicas), known_models(replicas, None)
    if model and (model in names or model in departed):
        return Known(model)
    if not models:
        return Pending()
    if model:
        again_at_s = _next_expiry_s(replicas, now_s)
        return Unknown(names) if again_at_s is None else Pending(again_at_s)
    if len({replica.models for replica in replicas if replica.models}) > 1:
        return Ambiguous(models)
    return Known(models[0])


def _resolve_listed(
    model: str | None, replicas: Collection[Replica], departed: Collection[str], listed: Sequence[Service]
) -> Resolution:
    models = sorted({*reported_models(replicas), *_listed_models(listed)})
    if model:
        names = known_models(replicas, listed)
        return Known(model) if model in names or model in departed else Unknown(names)
    if len({frozenset(service.models) for service in listed} | {r.models for r in replicas if r.models}) > 1:
        return Ambiguous(models)
    return Known(models[0]) if models else Pending()


def known_models(replicas: Collection[Replica], listed: Sequence[Service] | None) -> list[str]:
    """Names of the models and adapters that replicas reported or the list has."""
    reported = (name for replica in replicas for name in replica.adapters)
    of_list = (name for service in listed or () for name in service.adapters)
    return sorted({*reported_models(replicas), *_listed_models(listed or ()), *reported, *of_list})


def _listed_models(listed: Sequence[Service]) -> list[str]:
    return [model for service in listed for model in service.models]


def reported_models(replicas: Iterable[Replica]) -> list[str]:
    """Names of the base models."""
    return sorted({model for replica in replicas for model in replica.models})


def _next_expiry_s(replicas: Iterable[Replica], now_s: float) -> float | None:
    """Time at which the next replica without reported models no longer delays a 404. None if there is none."""
    expiries = (
        replica.away_since_s + MAX_AWAY_S
        for replica in replicas
        if not replica.models and replica.away_since_s is not None
    )
    return min((expiry_s for expiry_s in expiries if expiry_s > now_s), default=None)
