"""The claim for a model cache on a real API server: its owner under server-side apply, and what outlives a service."""

from pathlib import Path
from typing import Any

from octavo_operator.cluster.client import path_of
from octavo_testing.control_plane import ControlPlane
from octavo_testing.operator_namespace import MERGE, OperatorNamespace
from octavo_testing.waiting import eventually

NAME, CLAIM = "llm", "llm-models"


def _model(**cache: Any) -> dict[str, Any]:
    return {"uri": "hf://a/b", "cache": {"mode": "PVC", "size": "1Gi"} | cache}


def test_a_retained_claim_outlives_its_service_and_is_adopted_again(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    path = f"{path_of('PersistentVolumeClaim', plane_namespace)}/{CLAIM}"

    def owners() -> list[str]:
        return [owner["name"] for owner in plane.call("GET", path)["metadata"].get("ownerReferences", ())]

    def is_ending() -> bool:
        return not plane.is_answering(path) or "deletionTimestamp" in plane.call("GET", path)["metadata"]

    with OperatorNamespace(plane, plane_namespace, tmp_path) as operated:

        def switch(policy: str) -> None:
            change = {"spec": {"model": {"cache": {"retentionPolicy": policy}}}}
            plane.call("PATCH", f"{operated.services}/{NAME}", change, kind=MERGE)
            operated.wait_until_settled(NAME)

        operated.create(NAME, replicas=0, model=_model(retentionPolicy="Retain"))
        operated.wait_until_settled(NAME)
        uid = plane.call("GET", path)["metadata"]["uid"]
        assert owners() == []
        switch("Delete")
        assert owners() == [NAME]
        switch("Retain")
        assert owners() == []

        operated.delete(NAME)
        eventually(lambda: not operated.leftover_objects(), describe=operated.leftover_objects)
        assert owners() == []
        operated.create(NAME, replicas=0, model=_model(accessMode="ReadWriteMany"))
        operated.wait_until_settled(NAME)
        claim = plane.call("GET", path)
        assert (claim["metadata"]["uid"], claim["spec"]["accessModes"]) == (uid, ["ReadWriteOnce"])
        assert owners() == [NAME]
        reasons = {row["type"]: row["reason"] for row in operated.status(NAME)["conditions"]}
        assert (reasons["Accepted"], reasons["ChildrenApplied"]) == ("ClaimDiffers", "Applied")

        operated.delete(NAME)
        eventually(is_ending)
