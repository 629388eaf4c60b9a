"""Laws of the plan over random histories of edits, pod deaths, drift, stale views and interrupted operators."""

import random
from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from octavo_operator.desired.engine import engine_revision
from octavo_operator.desired.service_secrets import ServiceSecrets
from octavo_operator.observed import EngineDeployment, Observed, Pod
from octavo_operator.plan.actions import Delete
from octavo_operator.plan.plan import KEPT, Plan, plan
from octavo_operator.plan.rollout import STEADY, rollout
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import HOST, KEYS, OPEN, Case, stored
from octavo_testing.newer_templates import newer_templates
from octavo_testing.plan_cluster import PlanCluster

SETTINGS = Settings(
    engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system", has_group_sets=True
)
#: A replica of one pod, and one of two pods.
DIVISIONS: tuple[dict[str, Any], ...] = ({}, {"parallelism": {"tensor": 2, "nodes": 2}})
SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"replicas": 0},
    {"replicas": 3},
    {"engine": {"maxModelLen": 100}},
    {"engine": {"maxModelLen": 200}, "replicas": 2},
    DIVISIONS[1],
    DIVISIONS[1] | {"replicas": 3},
    DIVISIONS[1] | {"engine": {"maxModelLen": 200}, "replicas": 2},
    {"exposure": HOST, "auth": KEYS},
    {"auth": OPEN, "networkPolicy": {"enabled": False}},
    {"router": {"ref": {"name": "other"}}, "replicas": 2},
)
ROUNDS = 30

EVENTS = (
    *("edit", "kill", "restart", "drift", "pods", "pods", "operate", "operate", "die", "stale view", "stale spec"),
    *("router restart", "routers", "share", "upgrade", "endpoints", "serve", "serve"),
)
events = st.lists(st.sampled_from(EVENTS), max_size=40)


class World:
    """A cluster, the current spec, and an operator that acts on views of both."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cluster = PlanCluster()
        self.generation = 0
        self.settings = SETTINGS
        self.old_view: Observed | None = None
        self.old_service: InferenceService | None = None
        self.edit()

    def edit(self) -> None:
        self.generation += 1
        self.old_service = getattr(self, "service", None)
        self.service: InferenceService = read_service(
            stored(Case("", self.rng.choice(SPECS), name="llm"), generation=self.generation)
        )

    def planned(self, view: Observed | None = None) -> Plan:
        seen, secret = view or self.cluster.observe(), str(self.rng.random())
        secrets = ServiceSecrets(shared=secret, admin=f"{secret} for admins", group=f"{secret} for a group")
        return plan(self.service, seen, self.settings, now=self.cluster.now, new_secrets=secrets)

    def operate(self, *, view: Observed | None = None, dies: bool = False, least: int | None = None) -> None:
        """Run one reconciliation; with a current view it must not reduce serving pods below `least`, by default the
        wanted number."""
        before, wanted = self.cluster.num_staying(), self.service.spec.replicas if least is None else least
        planned = self.planned(view)
        end = self.rng.randint(0, len(planned.actions)) if dies else len(planned.actions)
        for action in planned.actions[:end]:
            self.cluster.execute(action)
        if view is None:
            assert self.cluster.num_staying() >= min(before, wanted)
        if not dies:
            self.cluster.status = planned.status

    def happen(self, event: str) -> None:
        match event:
            case "edit":
                self.edit()
            case "operate":
                self.operate()
            case "die":
                self.operate(dies=True)
            case "stale view":
                self.operate(view=self.old_view)
                self.old_view = self.cluster.observe()
            case "stale spec" if self.old_service is not None:
                self.service, now = self.old_service, self.service
                self.operate()
                self.service = now
            case "upgrade":  # an upgrade of the chart with another image
                self.settings = replace(SETTINGS, engine_image=f"engine:{self.rng.randint(1, 3)}")
            case _:
                self._befall(event)

    def _befall(self, event: str) -> None:
        """Apply an event to the cluster."""
        cluster, rng = self.cluster, self.rng
        match event:
            case "kill" if cluster.pods:
                cluster.kill_pod(rng.choice(sorted(cluster.pods)))
            case "restart" if cluster.pods:
                cluster.restart_engine(rng.choice(sorted(cluster.pods)))
            case "drift" if cluster.objects:
                cluster.edit(rng.choice(sorted(cluster.objects)), rng)
            case "pods":
                cluster.settle_pods(rng)
            case "router restart":
                cluster.restart_router(rng.choice(("router-0", "router-1", "other-router")))
            case "routers":
                cluster.deliver_router_reports(rng)
            case "endpoints":
                cluster.deliver_endpoints(rng)
            case "serve":
                cluster.serve(rng)
            case "share":
                cluster.shares = not cluster.shares

    def converge(self) -> None:
        self.cluster.shares = True
        self.cluster.deliver_router_reports()
        for _ in range(ROUNDS):
            self.operate()
            self.cluster.settle_pods()
            self.cluster.deliver_endpoints()
            self.cluster.now_s += 10
            for router in self.cluster.routers.values():
                router.streams.clear()
            planned = self.planned()
            if not planned.actions and planned.again_s is None:
                return
        raise AssertionError(f"still to do after {ROUNDS} rounds: {self.planned().actions}")


@given(seed=st.integers(0, 2**32), history=events)
def test_every_history_converges_to_the_undisturbed_result(seed: int, history: list[str]) -> None:
    world = World(random.Random(seed))
    for event in history:
        world.happen(event)
    world.converge()
    undisturbed = World(random.Random(seed))
    undisturbed.service, undisturbed.settings = world.service, world.settings
    undisturbed.converge()
    assert _essence(world.cluster) == _essence(undisturbed.cluster)
    assert world.cluster.num_serving == world.service.spec.replicas


@given(seed=st.integers(0, 2**32), history=events)
def test_a_converged_cluster_is_not_written_to(seed: int, history: list[str]) -> None:
    world = World(random.Random(seed))
    for event in history:
        world.happen(event)
    world.converge()
    world.operate()
    before, status = world.cluster.num_writes, world.cluster.status
    world.operate()
    assert world.cluster.num_writes == before
    assert world.cluster.status == status


@given(seed=st.integers(0, 2**32), history=events, later=events)
def test_an_upgrade_of_the_operator_writes_nothing(seed: int, history: list[str], later: list[str]) -> None:
    """The newer operator writes other templates. Another history makes Deployments of both versions."""
    world = World(random.Random(seed))
    for event in history:
        world.happen(event)
    world.converge()
    before = world.cluster.num_writes
    with newer_templates():
        world.converge()
        assert world.cluster.num_writes == before
        for event in later:
            world.happen(event)
        world.converge()
    assert world.cluster.num_serving == world.service.spec.replicas


@given(seed=st.integers(0, 2**32), history=events)
def test_serving_pods_are_kept_until_the_new_revision_serves(seed: int, history: list[str]) -> None:
    """While no pod dies, edits don't reduce the serving pods below both the old and the new number of replicas, cut no
    request, leave no router without a replica, and need room for one engine more. The last edit wins, however fast
    they come."""
    world = World(random.Random(seed))
    for event in history:
        world.happen(event)
    world.service = _service_of(world.service.spec.replicas)  # it has a router of its own from now on
    world.converge()
    cluster, rng = world.cluster, world.rng
    before, cluster.num_cut, cluster.num_lost = cluster.num_serving, 0, 0
    for length in range(300, 300 + rng.randint(1, 20)):
        wanted = rng.choice((before, before, before + 1, max(0, before - 1)))
        spec = {"engine": {"maxModelLen": length}, "replicas": wanted} | rng.choice(DIVISIONS)
        world.service = read_service(stored(Case("", spec, name="llm"), generation=world.generation + 1))
        most = max(wanted + 1, cluster.num_held)
        for _ in range(rng.randint(1, 8)):
            world.operate(dies=rng.random() < 0.2)
            for event in rng.choices(("pods", "endpoints", "serve", "router restart", "routers"), k=3):
                world.happen(event)
            assert cluster.num_serving >= min(before, wanted)
            assert len(cluster.pods) <= most
            cluster.num_lost *= bool(min(before, wanted))
            assert cluster.num_cut == cluster.num_lost == 0
        before = min(before, wanted)
    world.converge()
    assert [s.revision for s in world.cluster.engine_deployments.values()] == [
        engine_revision(world.service, world.settings)
    ]


def _rolled_out(seed: int, replicas: int, division: dict[str, Any], *, room: int) -> World:
    """A world where `replicas` serve, there is room for `room` of them, and another revision is wanted."""
    world = World(random.Random(seed))
    world.service = _service_of(replicas, **division)
    world.converge()
    world.cluster.room, world.cluster.num_cut = room, 0
    world.service = _service_of(replicas, engine={"maxModelLen": 300}, **division)
    return world


def _service_of(replicas: int, **spec: Any) -> InferenceService:
    rollout = {"surgePatienceSeconds": 20, "progressDeadlineSeconds": 300}
    return read_service(stored(Case("", {"replicas": replicas, "rollout": rollout, **spec}, name="llm")))


def _watch(world: World, *, least: int) -> None:
    """Let time pass, in which at least so many replicas serve, the service is Ready, and no request is cut."""
    for _ in range(120):
        world.operate(least=least)
        for event in ("pods", "endpoints", "serve"):
            world.happen(event)
        assert world.cluster.num_serving >= least
        assert _reasons(world)["Ready"] == "Serving"
        assert world.cluster.num_cut == 0


divisions = st.sampled_from(DIVISIONS)
LONG = settings(max_examples=max(5, settings().max_examples // 20))  # each with many plans


@LONG
@given(seed=st.integers(0, 2**32), replicas=st.integers(2, 4), division=divisions)
def test_without_room_for_a_surge_a_rollout_goes_in_place(seed: int, replicas: int, division: dict[str, Any]) -> None:
    world = _rolled_out(seed, replicas, division, room=replicas)
    _watch(world, least=replicas - 1)
    assert world.cluster.num_unplaced == 1
    assert _revisions_of(world) == [engine_revision(world.service, SETTINGS)]
    assert world.cluster.num_serving == replicas


@LONG
@given(seed=st.integers(0, 2**32), division=divisions)
def test_a_single_replica_is_never_replaced_in_place(seed: int, division: dict[str, Any]) -> None:
    world = _rolled_out(seed, 1, division, room=1)
    _watch(world, least=1)
    assert _reasons(world)["Progressing"] == "NoRoomToSurge"
    world.cluster.room = 2
    _watch(world, least=1)
    assert len(world.cluster.engine_deployments) == 1


@LONG
@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 3), room=st.integers(0, 2), division=divisions)
def test_a_revision_that_never_serves_is_given_up(
    seed: int, replicas: int, room: int, division: dict[str, Any]
) -> None:
    """The old one is then whole, and an edit back to it or to another revision works."""
    assume(room or replicas > 1)
    world, least = _rolled_out(seed, replicas, division, room=replicas + room), replicas - (room == 0)
    world.cluster.broken.add(engine_revision(world.service, SETTINGS))
    _watch(world, least=least)
    assert _reasons(world)["Progressing"] == "DeadlineExceeded"
    assert _revisions_of(world) == [engine_revision(_service_of(replicas, **division), SETTINGS)]
    assert world.cluster.num_serving == replicas
    world.service = _service_of(replicas, engine={"maxModelLen": world.rng.choice((400, None))}, **division)
    _watch(world, least=least)
    assert _revisions_of(world) == [engine_revision(world.service, SETTINGS)]


@LONG
@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 3), division=divisions)
def test_two_edits_a_second_for_a_minute_end_at_the_last(seed: int, replicas: int, division: dict[str, Any]) -> None:
    world = _rolled_out(seed, replicas, division, room=replicas + 1)
    for number in range(120):
        spec = {"replicas": replicas, "engine": {"maxModelLen": 301 + number}} | division
        world.service = read_service(stored(Case("", spec, name="llm"), generation=2 + number))
        world.operate(least=replicas)
        for event in world.rng.choices(("pods", "endpoints"), k=2):
            world.happen(event)
        if number % 20 == 19:
            world.happen("serve")  # ten seconds
        assert world.cluster.num_serving >= replicas
        assert len(world.cluster.pods) <= replicas + 1
    world.converge()
    assert world.cluster.num_cut == 0
    assert _revisions_of(world) == [engine_revision(world.service, SETTINGS)]


def _reasons(world: World) -> dict[str, str]:
    return {row["type"]: row["reason"] for row in world.cluster.status["conditions"]}


def _revisions_of(world: World) -> list[str]:
    return [each.revision for each in world.cluster.engine_deployments.values()]


#: A pod's revision (0 is the wanted one), and whether it is ready, was admitted, and is terminating.
pods = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()), max_size=10)


@given(replicas=st.integers(0, 4), found=pods, sets=st.sets(st.integers(0, 3)))
def test_a_revision_that_covers_missing_replicas_is_kept(
    replicas: int, found: list[tuple[int, bool, bool, bool]], sets: set[int]
) -> None:
    service = read_service(stored(Case("", {"replicas": replicas}, name="llm")))
    names = [engine_revision(service, SETTINGS), "r1", "r2", "r3"]
    seen = Observed(
        engine_deployments=tuple(
            EngineDeployment(name=names[i], uid=names[i], revision=names[i], replicas=1, created=str(i))
            for i in sorted(sets)
        ),
        pods=tuple(
            Pod(
                name=f"p{n}",
                uid=f"u{n}",
                revision=names[i],
                is_ready=ready,
                is_pod_ready=ready,
                is_admitted=admitted,
                is_terminating=ends,
            )
            for n, (i, ready, admitted, ends) in enumerate(found)
            if i in sets
        ),
    )
    steps = rollout(service, seen, SETTINGS, STEADY, now="2026-01-01T00:00:00Z")
    deleted = {action.name for action in steps.actions if isinstance(action, Delete)}
    serving = [pod.revision for pod in seen.pods if pod.serves]
    assert names[0] not in deleted
    assert sum(revision not in deleted for revision in serving) >= min(len(serving), replicas)
    idle = {s.revision for s in seen.engine_deployments} - {p.revision for p in seen.pods if p.is_admitted} - {names[0]}
    assert idle <= deleted


@given(seed=st.integers(0, 2**32), history=events)
def test_the_secret_is_generated_once(seed: int, history: list[str]) -> None:
    world = World(random.Random(seed))
    world.operate()
    drawn = dict(world.cluster.secrets)
    for event in history:
        world.happen(event)
        drawn = world.cluster.secrets | drawn
    world.converge()
    assert world.cluster.secrets == world.cluster.secrets | drawn


def _essence(cluster: PlanCluster) -> Any:
    """Reduce the cluster to its final state, without names of pods, uids and times, and without objects that stay
    until their service is deleted."""
    final = {ref: made for ref, made in cluster.objects.items() if ref[0] not in KEPT}
    objects = {ref: {k: v for k, v in made.items() if k != "metadata"} for ref, made in final.items()}
    sets = {s.name: s.replicas for s in cluster.engine_deployments.values()}
    return objects, sets, len(cluster.pods), cluster.num_serving
