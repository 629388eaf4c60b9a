"""Faulty manifests on a real API server, beside and on a running service: each is refused or shows a condition in 10 s,
and the service keeps admitting replaced pods and obeys its scale."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from octavo_testing.control_plane import GARBAGE, ControlPlane, control_plane, missing_tools
from octavo_testing.faulty_manifests import FAULTY_EDITS, MANIFESTS, OWNER, FaultyManifest
from octavo_testing.infsvc_cases import HOST, OPEN
from octavo_testing.operator_namespace import MERGE, OperatorNamespace
from octavo_testing.simulated_kubelet import SimulatedKubelet
from octavo_testing.waiting import eventually

pytestmark = pytest.mark.slow
JSON_PATCH = "application/json-patch+json"
NAMESPACE, WITHIN_S = "default", 10.0
CONTROLLERS = (GARBAGE, "deployment-controller", "replicaset-controller")
REFUSED = [manifest for manifest in MANIFESTS if not manifest.reason]
SHOWN = [manifest for manifest in MANIFESTS if manifest.reason]


class Scene:
    """A running service with an operator, and the faulty manifests that were created beside it."""

    def __init__(self, plane: ControlPlane, operated: OperatorNamespace, kubelet: SimulatedKubelet) -> None:
        self.plane, self.operated, self.kubelet = plane, operated, kubelet
        self._created: set[str] = set()

    def create(self, manifest: FaultyManifest) -> str:
        """Create the service as `kubectl apply` does, with strict validation; return the refusal, or an empty text.
        A service that exists stays as it is."""
        if manifest.name in self._created:
            return ""
        request = urllib.request.Request(
            f"{self.plane.url}{self.operated.services}?fieldValidation=Strict",
            manifest.text().encode(),
            self.plane.headers(),
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.plane.ssl_context):
                self._created.add(manifest.name)
                return ""
        except HTTPError as error:
            return str(json.loads(error.read())["message"])

    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.plane.call("GET", f"{self.operated.services}/{OWNER}")["spec"]
        return found

    def edit(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Replace the fields of the running service's spec that differ."""
        changed = [name for name in before | after if before.get(name) != after.get(name)]
        change = [
            {"op": "add", "path": f"/spec/{name}", "value": after[name]}
            if name in after
            else {"op": "remove", "path": f"/spec/{name}"}
            for name in changed
        ]
        self.plane.call("PATCH", f"{self.operated.services}/{OWNER}", change, kind=JSON_PATCH)

    def wait_until_ready(self, replicas: int) -> None:
        """Wait until so many engine pods, and no others, are admitted and ready."""
        eventually(
            lambda: self.kubelet.num_ready() == replicas == len(self.kubelet.pods()),
            within_s=30,
            describe=lambda: (self.operated.status(OWNER), self.operated.operator.log_tail()),
        )

    def replace_pod(self) -> None:
        before = self.kubelet.pods()
        self.kubelet.delete(before[0])
        eventually(lambda: before[0]["metadata"]["uid"] not in {p["metadata"]["uid"] for p in self.kubelet.pods()})
        self.wait_until_ready(len(before))

    def scale(self, replicas: int) -> None:
        """Scale as `kubectl scale` does."""
        scale = f"{self.operated.services}/{OWNER}/scale"
        self.plane.call("PATCH", scale, {"spec": {"replicas": replicas}}, kind=MERGE)
        self.wait_until_ready(replicas)

    def message(self, name: str, reason: str) -> str:
        """Message of the service's condition with this reason; empty without one."""
        rows = self.operated.status(name).get("conditions", ())
        return next((row["message"] for row in rows if row["reason"] == reason and row["type"] != "Ready"), "")

    def wait_for_condition(self, name: str, manifest: FaultyManifest) -> None:
        eventually(
            lambda: manifest.names in self.message(name, manifest.reason),
            within_s=WITHIN_S,
            describe=lambda: self.operated.status(name),
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if missing := missing_tools():
        pytest.skip(missing)
    with (
        control_plane(tmp_path_factory.mktemp("plane"), audit=True, controllers=CONTROLLERS) as plane,
        OperatorNamespace(plane, NAMESPACE, tmp_path_factory.mktemp("operator")) as operated,
    ):
        kubelet = SimulatedKubelet(plane, NAMESPACE, OWNER)
        with kubelet.running():
            made = Scene(plane, operated, kubelet)
            operated.create(OWNER, router={"replicas": 1}, exposure=HOST, auth=OPEN)
            made.wait_until_ready(1)
            yield made


def test_there_are_forty_manifests_of_four_kinds() -> None:
    assert len({manifest.name for manifest in MANIFESTS}) == len(MANIFESTS) >= 40
    assert {manifest.id for manifest in FAULTY_EDITS} <= {manifest.id for manifest in SHOWN}


@pytest.mark.parametrize("manifest", REFUSED, ids=lambda manifest: manifest.id)
def test_the_api_server_refuses_the_manifest_and_names_the_field(scene: Scene, manifest: FaultyManifest) -> None:
    assert manifest.names in scene.create(manifest)


@pytest.mark.parametrize("manifest", SHOWN, ids=lambda manifest: manifest.id)
def test_a_condition_names_the_field_within_10_s(scene: Scene, manifest: FaultyManifest) -> None:
    assert scene.create(manifest) == ""
    scene.wait_for_condition(manifest.name, manifest)


def test_a_running_service_beside_them_is_admitted_and_scaled(scene: Scene) -> None:
    assert [scene.create(manifest) for manifest in SHOWN] == [""] * len(SHOWN)
    scene.replace_pod()
    scene.scale(3)
    scene.replace_pod()
    scene.scale(1)


@pytest.mark.parametrize("manifest", FAULTY_EDITS, ids=lambda manifest: manifest.id)
def test_a_running_service_with_a_faulty_edit_is_admitted_and_scaled(scene: Scene, manifest: FaultyManifest) -> None:
    before = scene.spec()
    scene.edit(before, before | manifest.spec)
    scene.wait_for_condition(OWNER, manifest)
    scene.replace_pod()
    scene.scale(2)
    scene.edit(scene.spec(), before)
    eventually(lambda: not scene.message(OWNER, manifest.reason))
    scene.wait_until_ready(1)
