"""Another default image rolls out one service at a time, and a rollout that exceeds its deadline stops the rest."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.cluster.view import View
from octavo_operator.desired.engine import engine_revision
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS, PlanCluster

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
NEWER, FIXED = (replace(SETTINGS, engine_image=f"engine:{n}", router_image=f"router:{n}") for n in (2, 3))
DEADLINE_S = 60


def _service(generation: int = 1, **spec: Any) -> InferenceService:
    limits = {"rollout": {"progressDeadlineSeconds": DEADLINE_S}}
    return read_service(stored(Case("", limits | spec, name="llm"), generation=generation))


class Fleet:
    """Services, each in a cluster of its own; all are planned in turn, as by one operator."""

    def __init__(self, size: int) -> None:
        self.clusters = {("default", f"llm-{i}"): PlanCluster() for i in range(size)}
        self.services = dict.fromkeys(self.clusters, _service())
        self.settings = SETTINGS
        self.most = 0  # services that were rolled out at once
        self.run()

    def run(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            num_actions = 0
            for key, cluster in self.clusters.items():
                num_actions += self._operate(key, cluster)
                rolling = sum(len(each.engine_deployments) > 1 for each in self.clusters.values())
                self.most = max(self.most, rolling)
            if not num_actions and set(self.reasons) == {"Complete"}:
                return

    def _operate(self, key: tuple[str, str], cluster: PlanCluster) -> int:
        """Return the number of actions."""
        view = View()
        view.services = {other: {"status": each.status} for other, each in self.clusters.items()}
        seen = replace(cluster.observe(), upgrades=view.upgrades(key, ()))
        made = plan(self.services[key], seen, self.settings, now=cluster.now, new_secrets=SECRETS)
        for action in made.actions:
            cluster.execute(action)
        cluster.status = made.status
        cluster.settle_pods()
        cluster.deliver_endpoints()
        cluster.now_s += 10
        return len(made.actions)

    @property
    def reasons(self) -> list[str]:
        rows = (row for each in self.clusters.values() for row in each.status["conditions"])
        return [row["reason"] for row in rows if row["type"] == "Progressing"]

    @property
    def images(self) -> list[set[str]]:
        """Images of engines and routers by service."""
        return [
            {
                made["spec"]["template"]["spec"]["containers"][0]["image"]
                for made in (*each.engine_manifests.values(), each.objects["Deployment", "llm-router"])
            }
            for each in self.clusters.values()
        ]


@pytest.mark.parametrize(("size", "most"), [(10, 1), (5, 3)])
def test_so_many_services_are_rolled_out_at_a_time(size: int, most: int) -> None:
    fleet = Fleet(size)
    fleet.settings = replace(NEWER, max_rollouts=most)
    fleet.run(1)
    assert fleet.reasons == ["RollingOut"] * most + ["UpgradeWaits"] * (size - most)
    assert fleet.images[-1] == {"engine:1", "router:1"}
    fleet.run()
    assert fleet.most == most
    assert fleet.reasons == ["Complete"] * size
    assert fleet.images == [{"engine:2", "router:2"}] * size


def test_a_rollout_that_exceeds_its_deadline_stops_the_rest_until_another_image() -> None:
    fleet = Fleet(4)
    for cluster in fleet.clusters.values():
        cluster.broken.add(engine_revision(_service(), NEWER))
    fleet.settings = replace(NEWER, max_rollouts=2)
    fleet.run(20)
    assert fleet.reasons == ["DeadlineExceeded"] * 2 + ["UpgradeStopped"] * 2
    assert all(cluster.num_serving == 1 for cluster in fleet.clusters.values())
    fleet.settings = FIXED
    fleet.run()
    assert fleet.reasons == ["Complete"] * 4


def test_a_service_that_serves_nothing_delays_no_other_service() -> None:
    """Its spec can be wrong, or its namespace full: it would keep its turn until the deadline, and stop the rest."""
    fleet = Fleet(4)
    broken = fleet.clusters["default", "llm-0"]
    broken.broken |= {engine_revision(_service(), settings) for settings in (SETTINGS, NEWER)}
    for name in [*broken.pods]:
        broken.kill_pod(name)
    fleet.run(2)
    fleet.settings = NEWER
    fleet.run(30)
    assert fleet.reasons[1:] == ["Complete"] * 3
    assert fleet.images[1:] == [{"engine:2", "router:2"}] * 3
    assert fleet.most == 2


def test_a_return_to_the_old_image_needs_no_turn() -> None:
    fleet = Fleet(3)
    for cluster in fleet.clusters.values():
        cluster.broken.add(engine_revision(_service(), NEWER))
    fleet.settings = NEWER
    fleet.run(20)
    assert fleet.reasons == ["DeadlineExceeded", "UpgradeStopped", "UpgradeStopped"]
    fleet.settings = SETTINGS
    fleet.run(5)
    assert fleet.reasons == ["Complete"] * 3


def test_a_service_that_waits_is_scaled_and_may_be_edited() -> None:
    fleet = Fleet(3)
    key, cluster = list(fleet.clusters.items())[-1]
    fleet.clusters["default", "llm-0"].broken.add(engine_revision(_service(), NEWER))
    fleet.settings = NEWER
    fleet.run(2)
    fleet.services[key] = _service(2, replicas=2)
    fleet.run(2)
    assert (fleet.reasons[-1], cluster.num_serving) == ("UpgradeWaits", 2)
    fleet.services[key] = _service(3, replicas=2, engine={"maxModelLen": 64})
    fleet.run(20)
    assert fleet.reasons[-1] == "Complete"
    assert fleet.images[-1] == {"engine:2", "router:2"}


def test_rollouts_whose_status_is_not_written_yet_count() -> None:
    view = View()
    view.services = {("default", name): {} for name in "ab"}
    assert view.upgrades(("default", "a"), {("default", "a"), ("default", "b"), ("default", "gone")}).num_running == 1
