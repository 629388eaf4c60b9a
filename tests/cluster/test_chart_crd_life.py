"""The CRD during a release's life with real helm and a real API server: kept, reused, adopted, upgraded."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.error import HTTPError

import pytest
import yaml
from octavo_testing.chart import CHART, HELM_MISSING, helm_binary, run_helm
from octavo_testing.control_plane import CRDS, LIMIT_S, ControlPlane, control_plane, missing_tools
from octavo_testing.infsvc_cases import Case

pytestmark = pytest.mark.skipif(helm_binary() is None, reason=HELM_MISSING)

NAME = "inferenceservices.serving.octavo.dev"
SERVICES = "/apis/serving.octavo.dev/v1alpha1/namespaces/default/inferenceservices"
NAMESPACE = "octavo-system"

Releases = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane for this module alone: its tests replace the CRD and delete all services."""
    if missing := missing_tools():
        pytest.skip(missing)
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture
def releases(own_plane: ControlPlane) -> Iterator[Releases]:
    """A function that runs helm. The CRD is deleted before the test, the releases after it."""
    if _crd(own_plane):
        own_plane.call("DELETE", f"{CRDS}/{NAME}")
        _until(lambda: _crd(own_plane) is None)
    installed: set[str] = set()

    def run(verb: str, release: str, chart: Path = CHART, *flags: str, **values: Any) -> tuple[int, str]:
        installed.add(release)
        where = ["--namespace", NAMESPACE, *(["--create-namespace"] if verb == "install" else [])]
        what = [release] if verb == "uninstall" else [release, str(chart)]
        done = run_helm(verb, *what, *where, *flags, values=values, kubeconfig=own_plane.kubeconfig())
        return done.returncode, done.stdout + done.stderr

    yield run
    for release in installed:
        run("uninstall", release, CHART, "--ignore-not-found")


def _crd(plane: ControlPlane) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = plane.call("GET", f"{CRDS}/{NAME}")
    except HTTPError as error:
        if error.code != 404:
            raise
        return None
    return found


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _fields(crd: dict[str, Any] | None) -> set[str]:
    """Names of the fields of the spec's first level."""
    assert crd is not None
    return set(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def _serve(plane: ControlPlane, name: str) -> str:
    """Create a service and return its uid."""
    _until(lambda: _is_served(plane))
    uid: str = plane.call("POST", SERVICES, Case("", {}, name=name).manifest())["metadata"]["uid"]
    return uid


def _is_served(plane: ControlPlane) -> bool:
    try:
        plane.call("GET", SERVICES)
    except HTTPError:
        return False
    return True


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of an older version, whose CRD lacks one field and has an additional one."""
    chart = tmp_path_factory.mktemp("older") / "octavo"
    shutil.copytree(CHART, chart)
    path = chart / "files" / f"{NAME}.yaml"
    crd = yaml.safe_load(path.read_text())
    fields = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del fields["podMetadata"]
    fields["formerly"] = {"type": "string"}
    path.write_text(yaml.safe_dump(crd))
    about = (chart / "Chart.yaml").read_text().replace("version: 0.1.0", "version: 0.0.9")
    (chart / "Chart.yaml").write_text(about)
    return chart


def test_the_crd_is_kept_on_uninstall_and_reused_on_install(releases: Releases, own_plane: ControlPlane) -> None:
    assert releases("install", "octavo")[0] == 0
    uid = _serve(own_plane, "kept")
    code, says = releases("uninstall", "octavo")
    assert (code, "were kept" in says) == (0, True)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid
    assert releases("install", "octavo") == (0, ANY)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid


def test_another_release_adopts_the_crd_only_with_a_flag(releases: Releases, own_plane: ControlPlane) -> None:
    assert releases("install", "first")[0] == 0
    uid = _serve(own_plane, "kept")
    releases("uninstall", "first")
    code, says = releases("install", "second")
    assert (code, 'current value is "first"' in says) == (1, True)
    assert releases("install", "second", CHART, "--take-ownership") == (0, ANY)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid
    assert releases("upgrade", "second") == (0, ANY)


@pytest.mark.parametrize(("flags", "values"), [(["--take-ownership"], {}), ([], {"crds": {"install": False}})])
def test_a_crd_applied_by_hand_is_adopted_or_left_alone(
    releases: Releases, own_plane: ControlPlane, flags: list[str], values: dict[str, Any]
) -> None:
    own_plane.call("POST", CRDS, yaml.safe_load((CHART / "files" / f"{NAME}.yaml").read_text()))
    code, says = releases("install", "octavo")
    assert (code, "invalid ownership metadata" in says) == (1, True)
    assert releases("install", "octavo", CHART, *flags, **values) == (0, ANY)
    crd = _crd(own_plane)
    assert crd is not None
    assert ("helm.sh/resource-policy" in crd["metadata"].get("annotations", {})) == bool(flags)


def test_an_upgrade_changes_the_crd_and_keeps_services(
    releases: Releases, own_plane: ControlPlane, older: Path
) -> None:
    assert releases("install", "octavo", older)[0] == 0
    uid = _serve(own_plane, "kept")
    assert ("podMetadata" in (before := _fields(_crd(own_plane))), "formerly" in before) == (False, True)
    assert releases("upgrade", "octavo") == (0, ANY)
    assert ("podMetadata" in (after := _fields(_crd(own_plane))), "formerly" in after) == (True, False)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid


@pytest.mark.parametrize("flags", [[], ["--take-ownership"]], ids=["same release", "another release"])
def test_an_older_crd_left_by_a_release_is_upgraded(
    releases: Releases, own_plane: ControlPlane, older: Path, flags: list[str]
) -> None:
    assert releases("install", "octavo", older)[0] == 0
    uid = _serve(own_plane, "kept")
    releases("uninstall", "octavo")
    assert releases("install", "another" if flags else "octavo", CHART, *flags) == (0, ANY)
    assert ("podMetadata" in (after := _fields(_crd(own_plane))), "formerly" in after) == (True, False)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid


def test_the_crd_stays_when_the_chart_stops_installing_it(releases: Releases, own_plane: ControlPlane) -> None:
    assert releases("install", "octavo")[0] == 0
    uid = _serve(own_plane, "kept")
    assert releases("upgrade", "octavo", crds={"install": False}) == (0, ANY)
    assert own_plane.call("GET", f"{SERVICES}/kept")["metadata"]["uid"] == uid


def test_notes_name_the_next_commands(releases: Releases, own_plane: ControlPlane) -> None:
    says = releases("install", "octavo", crds={"install": False}, watchNamespaces=["default"])[1]
    assert "kubectl apply --server-side -f crds/" in says
    says = releases("upgrade", "octavo", watchNamespaces=["default"])[1]
    assert "kubectl apply --server-side -f crds/" not in says
    assert "helm test octavo -n octavo-system" in says
    assert "kubectl apply -n default -f -" in says
