"""The operator survives an outage of the API server, and afterwards writes each change once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from octavo_testing.control_plane import ADMIN, CRD, CRDS, GARBAGE, ControlPlane, control_plane, missing_tools
from octavo_testing.infsvc_cases import HOST, OPEN
from octavo_testing.operator_namespace import OperatorNamespace
from octavo_testing.waiting import eventually


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane for one test, which may break it."""
    if missing := missing_tools():
        pytest.skip(missing)
    with control_plane(tmp_path, audit=True, controllers=(GARBAGE,)) as plane:
        yield plane


def test_changes_right_after_an_outage_are_applied_once(frail: ControlPlane, tmp_path: Path) -> None:
    with OperatorNamespace(frail, "default", tmp_path) as operated:
        operated.create("first")
        operated.wait_until_settled("first")
        with frail.apiserver_down():
            operated.wait_for_log("can't be read or renewed")
        since = frail.audit.mark()
        operated.scale("first", 2)
        operated.create("second")
        operated.wait_until_settled("first", "second")
        writes = operated.writes(since)
    of_first = {kind: count for (kind, name), count in writes.items() if name.startswith("first")}
    assert of_first == {"deployments": 1, "poddisruptionbudgets": 1, "inferenceservices/status": 1}
    assert {kind for (kind, _), count in writes.items() if count > 1} <= {"inferenceservices/status"}


def test_objects_deleted_unseen_leave_the_view(frail: ControlPlane, tmp_path: Path) -> None:
    """A watch with a compacted history restarts without deletions. The host of a deleted service must be free."""
    with OperatorNamespace(frail, "default", tmp_path) as operated:
        operated.create("ghost", auth=OPEN, exposure=HOST)
        operated.wait_until_settled("ghost")
        operated.operator.pause()
        operated.delete("ghost")
        eventually(lambda: not operated.leftover_objects(), describe=operated.leftover_objects)
        frail.compact()
        with frail.apiserver_down():
            operated.operator.resume()
            operated.wait_for_log("can't be read or renewed")
        operated.create("heir", auth=OPEN, exposure=HOST)
        operated.wait_until_settled("heir")
        reasons = {row["type"]: row["reason"] for row in operated.status("heir")["conditions"]}
        assert reasons["Accepted"] == "Valid"
        assert not [name for name in operated.leftover_objects() if "ghost" in name]


def test_the_operator_serves_a_cluster_that_lost_its_data(frail: ControlPlane, tmp_path: Path) -> None:
    """The versions of objects restart, too, so an old watch would never see them."""
    with OperatorNamespace(frail, "default", tmp_path, user=ADMIN) as operated:
        operated.create("before")
        operated.wait_until_settled("before")
        frail.wipe_etcd()
        frail.apiserver.start()
        frail.wait_until_ready()
        operated.wait_for_log("404 NotServed")
        frail.call("POST", CRDS, yaml.safe_load(CRD.read_text()))
        eventually(lambda: frail.is_answering(operated.services))
        operated.create("after")
        operated.wait_until_settled("after")
        assert not [name for name in operated.leftover_objects() if "before" in name]
