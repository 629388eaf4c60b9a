"""`replica_targets`: how many replicas each revision of a service shall have now. Pure numbers.

Each call is one step towards the wanted revision alone, made from the present state only: a revert, a third edit and a
new number of replicas are just other targets. If only this function's steps and drains remove pods:

- the serving replicas don't fall below `desired` (in place: `desired - 1`), and
- the pods that hold a node, those that end included, don't exceed `desired + surge`.

Plain scaling, without older revisions, is not bounded by the surge.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """`pods`: number of pods that are not terminating. `serving`: ordinals of serving pods; scaling keeps those below
    `replicas`. A Deployment keeps serving pods first, so theirs are 0, 1 and so on. `admitted`: number of pods that
    were admitted once, since unready and draining ones can serve again. `served_last`: no other one served since."""

    name: str
    replicas: int = 0
    pods: int = 0
    serving: Collection[int] = ()
    admitted: int = 0
    served_last: bool = False
    created: str = ""

    @property
    def held(self) -> int:
        return max(self.replicas, self.pods)

    @property
    def lasting(self) -> int:
        """Number of serving pods within `replicas`; the other serving pods may be removed at any moment."""
        return self.lasting_at(self.replicas)

    def lasting_at(self, replicas: int) -> int:
        return sum(ordinal < replicas for ordinal in self.serving)

    def replicas_for(self, count: int) -> int:
        """Least number of replicas, but at least `count`, that keeps `count` of the lasting pods, or all if there are
        fewer."""
        kept = sorted(ordinal for ordinal in self.serving if ordinal < self.replicas)[:count]
        return max(count, *(ordinal + 1 for ordinal in kept[-1:]), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """`ending`: terminating pods that still hold a node; without older revisions, only pods of revisions other than
    `wanted`. `in_place`: an old replica is removed before a new one starts, for lack of room. `paused`: the wanted
    revision gets no further replicas."""

    desired: int
    wanted: Revision
    older: Sequence[Revision] = ()
    ending: int = 0
    surge: int = 1
    in_place: bool = False
    paused: bool = False

    @property
    def limit(self) -> int:
        """Most pods that may hold a node."""
        return self.desired + (0 if self.in_place else self.surge)


def replica_targets(now: Situation) -> dict[str, int]:
    """Replicas by the name of the revision; 0 for one that is not needed any more."""
    if not now.older and not now.ending:
        return {now.wanted.name: now.wanted.replicas_for(now.desired)}
    older = sorted(now.older, key=_rank, reverse=True)
    missing = now.desired - now.in_place - now.wanted.lasting
    targets = _needed(older, missing)
    if older and (now.paused or not now.wanted.lasting):
        targets[older[0].name] += _growth(now, older[0], targets, missing)
    return targets | {now.wanted.name: _wanted_target(now, targets)}


def _rank(revision: Revision) -> tuple[int, int, bool, str]:
    """Serving replicas come first: otherwise a drained revision could be preferred again, and the other one drained."""
    return revision.lasting, revision.admitted, revision.served_last, revision.created


def _growth(now: Situation, main: Revision, targets: dict[str, int], missing: int) -> int:
    """Replicas to add to the main older revision if only it serves when the spec asks for more in mid-rollout."""
    if targets[main.name] < main.replicas or not (main.admitted or main.served_last):
        return 0
    room = now.limit - now.ending - sum(each.held for each in (now.wanted, *now.older))
    return max(0, min(room, missing - main.replicas))


def _needed(older: Sequence[Revision], missing: int) -> dict[str, int]:
    """Replicas to keep of older revisions, so that they provide `missing` serving ones. If none was admitted, the
    revision that served last stays: the wanted one may be unable to start."""
    targets = {}
    has_admitted = any(each.admitted for each in older)
    for each in older:
        is_kept = missing > 0 and (each.admitted > 0 if has_admitted else each.served_last)
        needed = each.replicas_for(missing) if has_admitted else each.replicas
        targets[each.name] = min(each.replicas, needed) if is_kept else 0
        missing -= each.lasting_at(targets[each.name])
    return targets


def _wanted_target(now: Situation, targets: dict[str, int]) -> int:
    wanted = now.wanted
    room = now.limit - sum(max(each.held, targets[each.name]) for each in now.older)
    kept = min(wanted.replicas, max(room, wanted.replicas_for(wanted.lasting)))  # ending pods free their nodes anyway
    grown = kept if now.paused else max(kept, room - now.ending)
    return max(0, min(wanted.replicas_for(now.desired), grown))
