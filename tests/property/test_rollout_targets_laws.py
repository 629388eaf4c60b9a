"""Laws of `replica_targets`, for any situation and along whole rollouts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_operator.plan.rollout_targets import Revision, Situation, replica_targets


@st.composite
def revisions(draw: st.DrawFn, name: str) -> Revision:
    replicas = draw(st.integers(0, 5))
    pods = draw(st.integers(0, 6))
    admitted = draw(st.integers(0, pods))
    return Revision(
        name=name,
        replicas=replicas,
        pods=pods,
        admitted=admitted,
        serving=_serving(draw, draw(st.integers(0, admitted))),
        served_last=name == "old 0" and draw(st.booleans()),
        created=name,
    )


def _serving(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Ordinals of serving pods: any in a LeaderWorkerSet, and the first ones in a Deployment."""
    if draw(st.booleans()):
        return tuple(range(count))
    return tuple(draw(st.sets(st.integers(0, 6), min_size=count, max_size=count)))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    return Situation(
        desired=draw(st.integers(0, 5)),
        wanted=draw(revisions("wanted")),
        older=[draw(revisions(f"old {i}")) for i in range(draw(st.integers(0, 3)))],
        ending=draw(st.integers(0, 3)),
        surge=draw(st.integers(1, 3)),
        in_place=draw(st.booleans()),
        paused=draw(st.booleans()),
    )


@given(situations())
def test_no_serving_replica_that_is_needed_is_removed(now: Situation) -> None:
    targets = replica_targets(now)
    found = (now.wanted, *now.older)
    kept = sum(min(each.lasting, each.lasting_at(targets[each.name])) for each in found)
    assert kept >= min(sum(each.lasting for each in found), now.desired - now.in_place)


@given(situations())
def test_replicas_are_added_only_into_free_room(now: Situation) -> None:
    targets = replica_targets(now)
    grows = any(targets[each.name] > each.held for each in (now.wanted, *now.older))
    held = sum(max(each.held, targets[each.name]) for each in (now.wanted, *now.older)) + now.ending
    assert not (now.older or now.ending) or not grows or held <= now.limit


@given(situations())
def test_targets_are_within_bounds(now: Situation) -> None:
    targets = replica_targets(now)
    assert targets.keys() == {now.wanted.name, *(each.name for each in now.older)}
    assert all(0 <= target <= max(now.desired, each.replicas) for each, target in _with(now, targets))
    last, lasting = targets[now.wanted.name] - 1, now.wanted.lasting_at(targets[now.wanted.name])
    is_exceeded = last >= now.desired  # only for a pod that serves in the place of one with a lower ordinal
    assert not is_exceeded or (last in now.wanted.serving and lasting <= now.desired and last < now.wanted.replicas)
    assert not now.paused or not now.older or targets[now.wanted.name] <= now.wanted.replicas


@given(situations(), st.sampled_from(["", "old 0", "old 1", "old 2"]))
def test_a_drain_is_not_taken_back(now: Situation, last: str) -> None:
    """Drained pods don't serve, and the revision that served last may be another one: both change the order."""
    targets = replica_targets(now)
    drained = [
        replace(each, serving=[i for i in each.serving if i < targets[each.name]], served_last=each.name == last)
        for each in now.older
    ]
    again = replica_targets(replace(now, older=drained))
    gone = [each.name for each in now.older if each.serving and not targets[each.name]]
    assert not any(again[name] for name in gone)


@given(situations().filter(lambda now: not now.paused))
def test_every_rollout_ends_with_the_wanted_revision_alone(now: Situation) -> None:
    """If all pods start and end as targeted, 40 steps reach the end."""
    for _ in range(40):
        targets = replica_targets(now)
        stays = [replace(each, replicas=targets[each.name]) for each in (now.wanted, *now.older)]
        wanted, *older = [
            replace(each, pods=each.replicas, admitted=each.replicas, serving=range(each.replicas)) for each in stays
        ]
        now = replace(now, wanted=wanted, older=[each for each in older if each.replicas], ending=0)
    assert (now.wanted.lasting, now.wanted.replicas, list(now.older)) == (now.desired, now.desired, [])


def _steady(name: str, replicas: int, **fields: bool) -> Revision:
    serving = range(replicas)
    return Revision(name=name, replicas=replicas, pods=replicas, serving=serving, admitted=replicas, **fields)


def _starting(name: str, replicas: int) -> Revision:
    return Revision(name=name, replicas=replicas, pods=replicas)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(Situation(desired=2, wanted=Revision(name="w")), {"w": 2}, id="first revision"),
        pytest.param(
            Situation(desired=2, wanted=Revision(name="w"), older=[_steady("o", 2)]), {"w": 1, "o": 2}, id="one surge"
        ),
        pytest.param(
            Situation(desired=2, wanted=_steady("w", 1), older=[_steady("o", 2)]), {"w": 1, "o": 1}, id="old one goes"
        ),
        pytest.param(
            Situation(desired=2, wanted=_steady("w", 1), older=[_steady("o", 1)], ending=1),
            {"w": 1, "o": 1},
            id="no room until it has ended",
        ),
        pytest.param(
            Situation(desired=2, wanted=_steady("w", 1), older=[_steady("o", 1)]), {"w": 2, "o": 1}, id="then the next"
        ),
        pytest.param(
            Situation(desired=2, wanted=Revision(name="w"), older=[_steady("o", 2)], in_place=True),
            {"w": 0, "o": 1},
            id="in place",
        ),
        pytest.param(
            Situation(desired=4, wanted=_starting("w", 1), older=[_steady("o", 2)]),
            {"w": 1, "o": 4},
            id="more replicas: of the revision that serves",
        ),
        pytest.param(
            Situation(desired=1, wanted=_starting("w", 1), older=[_steady("o", 3)]), {"w": 0, "o": 1}, id="fewer"
        ),
        pytest.param(
            Situation(desired=2, wanted=Revision(name="w"), older=[_steady("o", 2), _starting("x", 1)]),
            {"w": 0, "o": 2, "x": 0},
            id="a third edit",
        ),
        pytest.param(
            Situation(desired=2, wanted=Revision(name="w"), older=[Revision(name="o", replicas=2, served_last=True)]),
            {"w": 1, "o": 2},
            id="what served last stays",
        ),
        pytest.param(
            Situation(
                desired=1,
                wanted=Revision(name="w"),
                older=[Revision(name="o", replicas=1, pods=1, admitted=1, served_last=True), _steady("x", 1)],
            ),
            {"w": 0, "o": 0, "x": 1},
            id="a drain is not taken back",
        ),
        pytest.param(
            Situation(desired=2, wanted=_steady("w", 1), older=[_steady("o", 1)], paused=True),
            {"w": 1, "o": 1},
            id="paused",
        ),
        pytest.param(
            Situation(desired=1, wanted=Revision(name="w", replicas=3, pods=3, serving=(2,), admitted=1)),
            {"w": 3},
            id="the only ordinal that serves stays",
        ),
        pytest.param(
            Situation(
                desired=2,
                wanted=_steady("w", 1),
                older=[Revision(name="o", replicas=3, pods=3, serving=(0, 1, 2), admitted=3)],
            ),
            {"w": 1, "o": 1},
            id="the highest ordinals go",
        ),
        pytest.param(
            Situation(
                desired=2,
                wanted=_steady("w", 1),
                older=[Revision(name="o", replicas=3, pods=3, serving=(1,), admitted=1)],
            ),
            {"w": 1, "o": 2},
            id="an ordinal that serves keeps those below it",
        ),
    ],
)
def test_examples(now: Situation, expected: dict[str, int]) -> None:
    assert replica_targets(now) == expected


def _with(now: Situation, targets: dict[str, int]) -> list[tuple[Revision, int]]:
    return [(each, targets[each.name]) for each in (now.wanted, *now.older)]
