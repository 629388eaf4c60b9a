"""Versions of pod templates: golden hashes of each, and an upgrade of the operator that replaces no pods."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from octavo_operator.desired import engine, router
from octavo_operator.desired.template_version import Versions, choose_template
from octavo_operator.observed import Upgrades
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, Case, stored
from octavo_testing.newer_templates import ADDED, newer_templates
from octavo_testing.plan_cluster import SECRETS, PlanCluster, settle

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
OTHER_SETTINGS = replace(SETTINGS, has_fixed_user=False, image_pull_secrets=("registry",), lame_duck_s=5)
TABLES: dict[str, Versions] = {"engine": engine.TEMPLATES, "group": engine.GROUPS, "router": router.TEMPLATES}
NUM_PODS = {"engine": "one", "group": "several"}


def _service(generation: int = 1, **spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm"), generation=generation))


def test_a_version_renders_the_same_template_for_ever(golden: Callable[[str, str], None]) -> None:
    """If a hash changes, an upgrade of the operator replaces these pods. So leave a released version as it was,
    and add another one to TEMPLATES (docs/internals/operator.md)."""
    golden("template_hashes.txt", "".join(f"{line}\n" for line in _hashes()))


def _hashes() -> Iterator[str]:
    for name, versions in TABLES.items():
        for number in versions:
            for case in ACCEPTED:
                service, only = read_service(stored(case)), {number: versions[number]}
                if NUM_PODS.get(name) == ("one" if service.num_nodes > 1 else "several"):
                    continue
                made = (choose_template(only, service, settings, ()) for settings in (SETTINGS, OTHER_SETTINGS))
                yield f"{name} version {number}: {' '.join(template.revision for template in made)} {case.id}"


def _templates(cluster: PlanCluster) -> list[str]:
    """All pod templates, as text."""
    deployments = [*cluster.engine_manifests.values(), cluster.objects["Deployment", "llm-router"]]
    return [str(made["spec"]["template"]) for made in deployments]


def test_an_upgrade_of_the_operator_writes_nothing() -> None:
    cluster = PlanCluster()
    settle(cluster, _service(replicas=2), SETTINGS)
    writes, pods = cluster.num_writes, set(cluster.pods)
    with newer_templates():
        settle(cluster, _service(replicas=2), SETTINGS)
    assert cluster.num_writes == writes
    assert set(cluster.pods) == pods


def test_a_live_template_is_applied_again_as_it_was() -> None:
    cluster = PlanCluster()
    settle(cluster, _service(), SETTINGS)
    before = _templates(cluster)
    for made in cluster.engine_manifests.values():  # another client changes the engines
        made["spec"]["template"]["spec"]["containers"][0]["args"] = []
    with newer_templates():
        settle(cluster, _service(2, replicas=3), SETTINGS)
    assert _templates(cluster) == before


def test_a_deployment_that_is_deleted_keeps_no_version() -> None:
    cluster = PlanCluster()
    settle(cluster, _service(), SETTINGS)
    for name, deployment in cluster.engine_deployments.items():
        cluster.engine_deployments[name] = replace(deployment, is_deleting=True)
    revisions = cluster.observe().revisions
    assert revisions == set()
    with newer_templates():
        assert engine.engine_revision(_service(), SETTINGS, live=revisions) != deployment.revision


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ({"engine": {"maxNumSeqs": 7}}, SETTINGS),
        ({}, replace(SETTINGS, engine_image="engine:2", router_image="router:2")),
    ],
    ids=["an edit", "other images"],
)
def test_a_change_of_the_service_takes_the_newest_version(
    spec: dict[str, Any],
    settings: Settings,
) -> None:
    cluster = PlanCluster()
    settle(cluster, _service(), SETTINGS)
    with newer_templates():
        settle(cluster, _service(2, **spec), settings)
    (made,) = cluster.engine_manifests.values()
    assert ADDED in str(made)
    assert (ADDED in str(cluster.objects["Deployment", "llm-router"])) is (settings is not SETTINGS)


def test_a_router_of_an_older_version_gets_the_admin_secret_with_its_next_change() -> None:
    """Its pods stay as they are until then, and the operator creates no Secret that they do not need."""
    cluster = PlanCluster()
    with mock.patch.dict(router.TEMPLATES, {1: router.TEMPLATES[1]}, clear=True):
        settle(cluster, _service(), SETTINGS)
    assert {*cluster.secrets} == {"llm-router-secret"}
    writes = cluster.num_writes
    settle(cluster, _service(), SETTINGS)
    assert (cluster.num_writes, {*cluster.secrets}) == (writes, {"llm-router-secret"})

    newer = replace(SETTINGS, engine_image="engine:2", router_image="router:2")
    cluster.status = plan(_service(), cluster.observe(), SETTINGS, now=cluster.now, new_secrets=SECRETS).status
    waiting = replace(cluster.observe(), upgrades=Upgrades(num_running=1))
    assert plan(_service(), waiting, newer, now=cluster.now, new_secrets=SECRETS).actions == ()
    actions = plan(_service(), cluster.observe(), newer, now=cluster.now, new_secrets=SECRETS).actions
    assert [_name(action) for action in actions][:2] == ["llm-router-admin-secret", "llm-router"]
    settle(cluster, _service(), newer)
    assert cluster.secrets == {"llm-router-secret": SECRETS.shared, "llm-router-admin-secret": SECRETS.admin}


def _name(action: Any) -> str:
    name: str = action.manifest["metadata"]["name"]
    return name
