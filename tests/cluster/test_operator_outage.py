"""The operator while its API server is away, and after: it lives on, and does what is to be done, once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from octavo_testing.control_plane import ADMIN, CRD, CRDS, GARBAGE, ControlPlane, control_plane, missing_tools
from octavo_testing.infsvc_cases import HOST, OPEN
from octavo_testing.operator_namespace import OperatorNamespace
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of one test's own, to be broken for good."""
    if missing := missing_tools():
        pytest.skip(missing)
    with control_plane(tmp_path, audit=True, controllers=(GARBAGE,)) as plane:
        yield plane


def test_what_changes_right_after_the_return_is_done_once(frail: ControlPlane, tmp_path: Path) -> None:
    with OperatorNamespace(frail, "default", tmp_path) as operated:
        operated.create("first")
        operated.wait_until_settled("first")
        with frail.apiserver_down():
            operated.wait_for_log("can't be renewed")
        since = frail.audit.mark()
        operated.scale("first", 2)
        operated.create("second")
        operated.wait_until_settled("first", "second")
        writes = operated.writes(since)
    of_first = {kind: count for (kind, name), count in writes.items() if name.startswith("first")}
    assert of_first == {"deployments": 1, "inferenceservices/status": 1}
    assert {kind for (kind, _), count in writes.items() if count > 1} <= {"inferenceservices/status"}


def test_what_was_deleted_unseen_is_forgotten(frail: ControlPlane, tmp_path: Path) -> None:
    """A watch whose history is compacted begins anew, and tells of no end. The host of what ended must be free."""
    with OperatorNamespace(frail, "default", tmp_path) as operated:
        operated.create("ghost", auth=OPEN, exposure=HOST)
        operated.wait_until_settled("ghost")
        operated.operator.pause()
        operated.delete("ghost")
        eventually(lambda: not operated.leftover_objects(), describe=operated.leftover_objects)
        frail.compact()
        with frail.apiserver_down():
            operated.operator.resume()
            operated.wait_for_log("can't be renewed")
        operated.create("heir", auth=OPEN, exposure=HOST)
        operated.wait_until_settled("heir")
        reasons = {row["type"]: row["reason"] for row in operated.status("heir")["conditions"]}
        assert reasons["Accepted"] == "Valid"
        assert not [name for name in operated.leftover_objects() if "ghost" in name]


def test_a_cluster_that_lost_everything_is_served_again(frail: ControlPlane, tmp_path: Path) -> None:
    """Also the versions of its objects begin anew, which a watch that goes on waits for in vain."""
    with OperatorNamespace(frail, "default", tmp_path, user=ADMIN) as operated:
        operated.create("before")
        operated.wait_until_settled("before")
        frail.wipe_etcd()
        frail.apiserver.start()
        frail.wait_until_ready()
        operated.wait_for_log("install its CRD again")
        frail.call("POST", CRDS, yaml.safe_load(CRD.read_text()))
        eventually(lambda: frail.is_answering(operated.services))
        operated.create("after")
        operated.wait_until_settled("after")
        assert not [name for name in operated.leftover_objects() if "before" in name]
