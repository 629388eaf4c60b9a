"""`helm upgrade` with ten running services: a newer operator, which writes other pod templates, replaces no pods, and
another image of the engines rolls out one service at a time."""

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from octavo_e2e.cluster import Cluster, Raw, Step, condition
from octavo_e2e.providers import ROOT
from octavo_e2e.release import Release
from octavo_testing.cluster import LOCAL

pytestmark = [pytest.mark.last, pytest.mark.timeout(900, func_only=True)]

NAMES = tuple(f"service-{number}" for number in range(10))
BUILD_S, START_S, ROLLED_S = 600, 480, 1800
PREFIX, TAG = os.environ.get("IMAGE_PREFIX", "localhost/octavo"), "newer"
SERVICE, ENGINES = "serving.octavo.dev/service", "app.kubernetes.io/component=engine"
ADDED = "ADDED_BY_AN_UPGRADE"
#: Appended to the modules that make the pods of engines and routers.
NEWER = f"""

def _newer(service, settings):
    template = _template(service, settings)
    template["spec"]["containers"][0]["env"].append({{"name": "{ADDED}", "value": "1"}})
    return template


TEMPLATES = {{**TEMPLATES, max(TEMPLATES) + 1: _newer}}
"""
#: Twenty pods fit on a node with two cores.
LITTLE = {"resources": {"requests": {"cpu": "10m", "memory": "300Mi"}, "limits": {"memory": "1Gi"}}}


@pytest.fixture
def newer_operator(cluster: Cluster, step: Step, tmp_path: Path) -> str:
    """The image of an operator with another version of both pod templates."""
    source = tmp_path / "octavo"
    for part in ("operator", "images"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "constraints.txt", source)
    if LOCAL.exists():
        (tmp_path / "shared").symlink_to(LOCAL.parent)
    for name in ("engine", "router"):
        module = source / "operator" / "src" / "octavo_operator" / "desired" / f"{name}.py"
        module.write_text(module.read_text() + NEWER)
    with step("build a newer operator"):
        return _build(cluster, "operator", source)


@pytest.fixture
def services(cluster: Cluster, namespace: str, release: Release, step: Step) -> Iterator[str]:
    """The namespace of ten ready services; afterwards the operator of this commit runs again."""
    with step("ten services start"):
        for name in NAMES:
            cluster.serve(namespace, name, router={"replicas": 1, **LITTLE}, **LITTLE)
        for name in NAMES:
            cluster.until_ready(namespace, name, within_s=START_S)
    yield namespace
    release.upgrade("--reset-values")
    release.until_up()


def test_a_newer_operator_replaces_no_pods(
    services: str, newer_operator: str, cluster: Cluster, release: Release, step: Step
) -> None:
    before = _pods(cluster, services)
    assert len(before) == 2 * len(NAMES)
    with step("helm upgrade to a newer operator"):
        release.upgrade("--set", f"images.operator={newer_operator}")
        release.until_up()
        cluster.serve(services, "new", replicas=0)
        cluster.until_reason(services, "new", "NoReplicas", of="ReplicasAdmitted")
    assert all(ADDED in str(made) for made in _deployments(cluster, services, "new"))

    cluster.kubectl("scale", "infsvc", NAMES[0], "--replicas=2", "-n", services)
    cluster.until_one(
        "InferenceService", services, NAMES[0], lambda found: found["status"]["replicas"]["ready"] == 2, within_s=120
    )
    cluster.kubectl("delete", "service", NAMES[1], "-n", services)
    cluster.until("Service", services, lambda found: NAMES[1] in map(_name, found), within_s=30)
    after = _pods(cluster, services)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2  # one more engine, and the router of the new service
    assert not any(ADDED in str(made) for name in NAMES for made in _deployments(cluster, services, name))


class RolloutWatch:
    """Follows the engines' pods: the most services that had two images at once, and the fewest pods that served one."""

    def __init__(self, image: str) -> None:
        self._image = image
        self.most_rolling, self.least_serving = 0, 1

    def is_over(self, pods: Sequence[Raw]) -> bool:
        """Take a list of the pods into account; return whether every service runs the new image only."""
        images, serving = defaultdict[str, set[str]](set), Counter[str]()
        for pod in pods:
            service = pod["metadata"]["labels"][SERVICE]
            serving[service] += condition(pod, "Ready").get("status") == "True"
            if "deletionTimestamp" not in pod["metadata"]:
                images[service].add(pod["spec"]["containers"][0]["image"])
        self.most_rolling = max(self.most_rolling, sum(len(each) > 1 for each in images.values()))
        self.least_serving = min(self.least_serving, *(serving[name] for name in NAMES))
        return all(images[name] == {self._image} for name in NAMES)


@pytest.mark.long
@pytest.mark.timeout(ROLLED_S + 600, func_only=True)
def test_another_engine_image_rolls_out_one_service_at_a_time(
    services: str, cluster: Cluster, release: Release, step: Step
) -> None:
    with step("build the image of the engine under another name"):
        watch = RolloutWatch(_build(cluster, "engine", ROOT))
    with step("ten services roll out to another image of the engine"):
        release.upgrade("--set", f"images.engine={PREFIX}/engine:{TAG}")
        cluster.until("Pod", services, watch.is_over, label=ENGINES, within_s=ROLLED_S, what="the new image everywhere")
    assert (watch.most_rolling, watch.least_serving) == (1, 1)


def _build(cluster: Cluster, image: str, source: Path) -> str:
    """Build an image from the files in `source` with another tag; return its name."""
    settings = ("env", f"IMAGE_PREFIX={PREFIX}", f"IMAGE_TAG={TAG}")
    cluster.provider.run(*settings, str(source / "images" / "build"), image, within_s=BUILD_S)
    return f"{PREFIX}/{image}:{TAG}"


def _pods(cluster: Cluster, namespace: str) -> dict[str, int]:
    """Uid of each pod, and how often its containers were restarted."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ()))
        for pod in cluster.find("Pod", namespace)
    }


def _deployments(cluster: Cluster, namespace: str, service: str) -> list[Raw]:
    found = cluster.find("Deployment", namespace, f"serving.octavo.dev/service={service}")
    assert len(found) == 2
    return found


def _name(found: Raw) -> str:
    name: str = found["metadata"]["name"]
    return name
