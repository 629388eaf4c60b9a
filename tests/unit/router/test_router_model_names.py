"""The model of a request, by the models that replicas reported and the time that others have been away."""

import pytest
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.listed_services import Service
from octavo_server.router.fleet.model_names import MAX_AWAY_S, Ambiguous, Known, Pending, Unknown, resolve_model
from octavo_server.router.fleet.replica import Replica

NOW_S = 100.0


def replica(*models, away_s=None, adapters=()):
    found = Replica(Endpoint("http://127.0.0.1:1", "r"))
    found.models, found.adapters = frozenset(models), dict.fromkeys(adapters, "hash")
    found.away_since_s = None if away_s is None else NOW_S - away_s
    return found


LOADING, DEAD = replica(away_s=1), replica(away_s=MAX_AWAY_S)
ADAPTING = replica("a", adapters=("x",))
SERVING, SERVING_OTHER, SERVING_AWAY = replica("a"), replica("b"), replica("a", away_s=99)


@pytest.mark.parametrize(
    ("model", "replicas", "expected"),
    [
        ("a", [SERVING], Known("a")),
        ("a", [SERVING_AWAY], Known("a")),
        ("a", [SERVING_AWAY, SERVING_OTHER], Known("a")),
        ("x", [], Pending()),
        ("x", [LOADING], Pending()),
        ("x", [DEAD], Pending()),
        (None, [], Pending()),
        (None, [DEAD], Pending()),
        ("x", [ADAPTING], Known("x")),
        ("x", [ADAPTING, SERVING], Known("x")),
        (None, [ADAPTING, SERVING], Known("a")),
        (None, [ADAPTING, SERVING_OTHER], Ambiguous(["a", "b"])),
        ("y", [ADAPTING], Unknown(["a", "x"])),
        ("x", [SERVING], Unknown(["a"])),
        ("x", [SERVING, DEAD], Unknown(["a"])),
        ("x", [SERVING_AWAY], Unknown(["a"])),
        ("x", [SERVING, SERVING_OTHER], Unknown(["a", "b"])),
        ("x", [SERVING, replica()], Unknown(["a"])),
        ("x", [SERVING, LOADING], Pending(NOW_S - 1 + MAX_AWAY_S)),
        ("x", [SERVING, DEAD, LOADING], Pending(NOW_S - 1 + MAX_AWAY_S)),
        (None, [SERVING], Known("a")),
        ("", [SERVING], Known("a")),
        (None, [SERVING, SERVING_AWAY, DEAD], Known("a")),
        (None, [SERVING, SERVING_OTHER], Ambiguous(["a", "b"])),
        (None, [replica("b", "a")], Known("a")),
    ],
)
def test_a_model_is_resolved_by_the_reported_names(model, replicas, expected):
    assert resolve_model(model, replicas, now_s=NOW_S) == expected


ONE, TWO = (Service("s", ("a", "a-large")),), (Service("s", ("a",)), Service("t", ("b",)))
WITH_ADAPTER = (Service("s", ("a",), ("x",)),)


@pytest.mark.parametrize(
    ("model", "replicas", "listed", "expected"),
    [
        ("a", [], ONE, Known("a")),
        ("a-large", [LOADING], ONE, Known("a-large")),
        ("x", [], ONE, Unknown(["a", "a-large"])),
        ("x", [LOADING], TWO, Unknown(["a", "b"])),
        ("b", [SERVING], TWO, Known("b")),
        ("new", [replica("new")], TWO, Known("new")),
        (None, [], ONE, Known("a")),
        (None, [replica("a-large", "a")], ONE, Known("a")),
        (None, [SERVING], TWO, Ambiguous(["a", "b"])),
        (None, [SERVING_OTHER], ONE, Ambiguous(["a", "a-large", "b"])),
        ("x", [], WITH_ADAPTER, Known("x")),
        ("x", [SERVING], WITH_ADAPTER, Known("x")),
        ("y", [ADAPTING], WITH_ADAPTER, Unknown(["a", "x"])),
        (None, [], WITH_ADAPTER, Known("a")),
        (None, [ADAPTING], WITH_ADAPTER, Known("a")),
        ("x", [], (), Unknown([])),
        (None, [], (), Pending()),
    ],
)
def test_a_model_is_resolved_by_the_listed_services(model, replicas, listed, expected):
    assert resolve_model(model, replicas, listed=listed, now_s=NOW_S) == expected


def test_a_pending_name_becomes_unknown_after_its_deadline():
    replicas = [SERVING, replica(away_s=1), replica(away_s=2)]
    pending = resolve_model("x", replicas, now_s=NOW_S)
    later = resolve_model("x", replicas, now_s=pending.again_at_s)
    assert resolve_model("x", replicas, now_s=later.again_at_s) == Unknown(["a"])


def test_a_model_whose_replicas_just_departed_is_known():
    assert resolve_model("gone", [SERVING], departed={"gone"}, now_s=NOW_S) == Known("gone")
    assert resolve_model("gone", [], departed={"gone"}, now_s=NOW_S) == Known("gone")
    assert resolve_model(None, [], departed={"gone"}, now_s=NOW_S) == Pending()
