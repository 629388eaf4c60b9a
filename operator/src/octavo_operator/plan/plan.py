"""`plan`: computes the actions for one service and its new status. Pure: no client, no clock, no randomness.

Every action derives from the difference between the desired and the observed state, never from earlier actions. So an
operator that dies between two actions, or acts on an old view, reaches the same final state.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import engine_ref, engine_revision, engine_templates
from octavo_operator.desired.network import exposed_url, internal_url, load_balancer_url
from octavo_operator.desired.objects import Manifest
from octavo_operator.desired.router import desired_engine_budget
from octavo_operator.desired.service_secrets import ServiceSecrets, desired_secrets, mounted_secrets
from octavo_operator.names import TEMPLATE, engine_selector, group_secret, router_deployment
from octavo_operator.observed import Observed, Ref, Refusal
from octavo_operator.plan.actions import Action, CreateOnce, Delete
from octavo_operator.plan.adapter_status import adapter_events, adapter_rows, notify_actions
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.cache_claim import KIND as CLAIM
from octavo_operator.plan.cache_claim import live_claim, with_fixed_fields
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.conditions import with_transition_times
from octavo_operator.plan.events import ServiceEvent, condition_events
from octavo_operator.plan.operator_upgrade import HELD_EVERY_S, held_pace, is_upgrade
from octavo_operator.plan.owner import is_ours, may_be_deleted, name_taken
from octavo_operator.plan.readiness_gates import gate_actions
from octavo_operator.plan.rollout import STEADY, Pace, Steps, last_served, pace_of, rollout, scale_current
from octavo_operator.plan.scaling_condition import scaling_status
from octavo_operator.plan.status_conditions import conditions_of, model_revisions, refused, size_of
from octavo_operator.service import InferenceService, Settings, UnreadableService

#: Numbers of running requests change too often to make a plan for each.
DRAIN_EVERY_S = 1.0
#: Patience and deadline of a rollout pass without an event.
PACE_EVERY_S = 5.0
#: Kinds that the operator has no right to delete. Kubernetes deletes them with their service.
KEPT = (CLAIM, "RoleBinding")


@dataclass(frozen=True, slots=True)
class Plan:
    """`actions` are in the order of execution, `status` is the new status of the service, and `events` report its
    changes. `again_s`: seconds until the next plan unless a change causes one earlier; None: wait for a change."""

    actions: tuple[Action, ...]
    status: dict[str, Any]
    events: tuple[ServiceEvent, ...] = ()
    again_s: float | None = None


def plan(
    service: InferenceService, observed: Observed, settings: Settings, *, now: str, new_secrets: ServiceSecrets
) -> Plan:
    """Make the plan for one service. `now`: RFC 3339. `new_secrets`: for Secrets that are created."""
    wanted = engine_revision(service, settings, live=observed.revisions)
    children = [with_digest(manifest) for manifest in _wanted_children(service, observed, settings)]
    observed = replace(observed, refusals={**_taken_names(service, observed, children, wanted), **observed.refusals})
    held = held_pace(service, observed, settings, wanted)
    pace = held or pace_of(service, observed, wanted, now=now)
    conditions = conditions_of(service, observed, settings, wanted=wanted, pace=pace)
    status = _status(service, observed, settings, wanted=wanted)
    is_rolling = any(c.type == "Progressing" and c.reason != "Complete" for c in conditions)
    marks = {"inPlace": pace.in_place, "upgrade": is_rolling and is_upgrade(service, observed, wanted)}
    if any(marks.values()):
        status["rollout"] = {name: True for name, holds in marks.items() if holds}
    before = observed.status.get("conditions", ())
    status["conditions"] = with_transition_times(conditions, before, generation=service.generation, now=now)
    events = (
        *condition_events(conditions, before),
        *adapter_events(status.get("adapters", ()), observed.status.get("adapters", ())),
    )
    if conditions[0].status != "True":
        return _plan(_keep_running(service, observed, settings, pace, now=now), observed, status, events)
    secrets = _secrets(service, observed, children, new_secrets, pace)
    before_engines = (*secrets, *_children(service, observed, children, pace))
    if pace.is_held:
        steps = scale_current(observed, service.spec.replicas, now=now, timeout_s=service.planned_drain_s)
    else:
        steps = rollout(service, observed, settings, pace, now=now)
    actions = (*before_engines, *notify_actions(service, observed), *steps.actions)
    return _plan(Steps(actions, steps.drain), observed, status, events, pace)


def _plan(
    steps: Steps, observed: Observed, status: dict[str, Any], events: Iterable[ServiceEvent], pace: Pace = STEADY
) -> Plan:
    gates = gate_actions(observed, steps.drain.leaving)
    rolling_s = PACE_EVERY_S if len(observed.revisions) > 1 else HELD_EVERY_S if pace.is_held else None
    again_s = DRAIN_EVERY_S if steps.drain.busy else rolling_s
    return Plan((*steps.actions, *gates), status, tuple(events), again_s)


def plan_unreadable(service: UnreadableService, observed: Observed, message: str, *, now: str) -> Plan:
    """Make the plan for a service whose spec the operator can't read. `message`: the reason. `now`: RFC 3339. The
    status keeps its other fields."""
    before, conditions = observed.status.get("conditions", ()), refused(message)
    replicas, updated = service.replicas, observed.status.get("revision", {}).get("updated", "")
    steps = scale_current(observed, replicas, now=now)
    desired = observed.status.get("replicas", {}).get("desired", 0) if replicas is None else replicas
    status = {
        **observed.status,
        "observedGeneration": service.generation,
        "replicas": _replicas(observed, desired=desired, wanted=updated),
        "conditions": with_transition_times(conditions, before, generation=service.generation, now=now),
    }
    return _plan(steps, observed, status, condition_events(conditions, before))


def _secrets(
    service: InferenceService, observed: Observed, children: Sequence[Manifest], values: ServiceSecrets, pace: Pace
) -> Iterator[Action]:
    """Create Secrets before the pods that refer to them. Secrets are not watched: a Secret is taken to be missing if no
    live template of router or engines refers to it, or if a pod fails for lack of the Secret.
    """
    router = ("Deployment", router_deployment(service.name))
    mounted = {name for made in children if _ref(made) == router for name in mounted_secrets(made["spec"]["template"])}
    live = observed.children.get(router)
    mounted_before = set() if live is None else mounted if pace.is_held else mounted_secrets(live["spec"]["template"])
    if service.num_nodes > 1:
        mounted.add(group_secret(service.name))
        templates = (engine_templates(live)[0] for live in observed.engine_manifests.values())
        mounted_before = mounted_before.union(*map(mounted_secrets, templates))
    for manifest, why in desired_secrets(service, values):
        name = manifest["metadata"]["name"]
        if name in mounted - mounted_before or (name in mounted and name in observed.missing_secrets):
            yield CreateOnce(manifest, why)


def _wanted_children(service: InferenceService, observed: Observed, settings: Settings) -> Iterator[Manifest]:
    claim = live_claim(service, observed)
    router = observed.children.get(("Deployment", router_deployment(service.name)), {})
    template = (router.get("metadata", {}).get("annotations") or {}).get(TEMPLATE)
    children = desired_children(
        service,
        settings,
        router_template=template,
        behind_router=observed.behind_router,
        taken_models=observed.taken_models,
    )
    for manifest in children:
        yield manifest if claim is None or manifest["kind"] != CLAIM else with_fixed_fields(manifest, claim)


def _taken_names(
    service: InferenceService, observed: Observed, children: Sequence[Manifest], revision: str
) -> dict[Ref, Refusal]:
    """Refusals for children whose names belong to objects of another owner."""
    engine = engine_ref(service, revision)
    live = {ref: observed.children.get(ref) for ref in map(_ref, children)}
    live[engine] = observed.engine_manifests.get(engine[1])
    return {ref: name_taken(raw) for ref, raw in live.items() if raw is not None and not is_ours(raw, service)}


def _children(
    service: InferenceService, observed: Observed, wanted: Sequence[Manifest], pace: Pace
) -> Iterator[Action]:
    for manifest in wanted:
        live = observed.children.get(_ref(manifest))
        if pace.is_held and live is not None and manifest["kind"] == "Deployment":
            continue  # routers wait with the engines
        if manifest["kind"] != "RoleBinding":
            yield from child_actions(service, observed, manifest, live)
        elif live is None:
            yield CreateOnce(manifest, "the router reads EndpointSlices by it")
    refs = set(map(_ref, wanted))
    for (kind, name), live in observed.children.items():
        if (kind, name) not in refs and kind not in KEPT and may_be_deleted(live, service.uid):
            metadata = live["metadata"]
            version = metadata.get("resourceVersion", "")
            yield Delete(kind, name, metadata["uid"], version, "the spec does not need it any more")


def _ref(manifest: Manifest) -> Ref:
    return manifest["kind"], manifest["metadata"]["name"]


def _status(service: InferenceService, observed: Observed, settings: Settings, *, wanted: str) -> dict[str, Any]:
    serving = [pod for pod in observed.pods if pod.serves]
    other = next((p.revision for p in serving), last_served(observed))
    current = wanted if any(p.revision == wanted for p in serving) else other
    addresses = list(_addresses(service, observed, settings))
    status: dict[str, Any] = {
        "observedGeneration": service.generation,
        "selector": ",".join(f"{key}={value}" for key, value in sorted(engine_selector(service.name).items())),
        "url": addresses[-1]["url"],
        "addresses": addresses,
        "replicas": _replicas(observed, desired=service.spec.replicas, wanted=wanted),
        "revision": {"updated": wanted} if current is None else {"current": current, "updated": wanted},
    }
    scaling = scaling_status(service, observed, settings)
    rows = adapter_rows(service, observed)
    adapters = {"adapters": rows} if rows else {}
    return status | _model(service, observed, wanted) | adapters | _load(observed) | scaling | _startup(observed)


def _replicas(observed: Observed, *, desired: int, wanted: str) -> dict[str, Any]:
    pods = [pod for pod in observed.pods if not pod.is_terminating]
    num_ready = sum(pod.serves for pod in pods)
    num_draining = sum(pod.is_terminating or pod.draining_since is not None for pod in observed.pods)
    return {
        "total": len(observed.pods),
        "desired": desired,
        "ready": num_ready,
        "updated": sum(pod.revision == wanted for pod in pods),
        "draining": num_draining,
        "summary": f"{num_ready}/{desired}",
    }


def _model(service: InferenceService, observed: Observed, wanted: str) -> dict[str, Any]:
    """The status field `model`. Without a router's report it keeps the old sizes, which are fixed for a revision."""
    pods = [pod for pod in observed.pods if pod.revision == wanted]
    size, revisions = size_of(observed, pods), model_revisions(observed, pods)
    model: dict[str, Any] = {"servedNames": list(service.served_names)}
    if size is not None:
        model |= {
            "maxModelLen": size.max_model_len,
            "weightsBytes": size.weights_bytes,
            "kvBytesPerToken": size.kv_bytes // size.kv_tokens,
            "maxConcurrentTokens": size.kv_tokens,
            **({"revision": next(iter(revisions))} if revisions else {}),
        }
    elif observed.status.get("revision", {}).get("updated") == wanted:
        model = observed.status.get("model", {}) | model
    return {"model": model}


def _startup(observed: Observed) -> dict[str, Any]:
    """Return the status field `startup`, taken from the newest pod that serves. The first times of a pod are kept,
    because the times in its status change when it becomes unready."""
    startups = [(pod.startup.created, pod.name, pod.startup) for pod in observed.pods if pod.serves and pod.startup]
    before: dict[str, Any] = observed.status.get("startup") or {}
    if not startups or max(startups)[1] == before.get("pod"):
        return {"startup": before} if before else {}
    _, name, startup = max(startups)
    phases = {f"{phase}Seconds": length for phase, length in zip(startup.PHASES, startup.seconds, strict=True)}
    reports = (report.startups.get(name, {}) for report in observed.routers.values() if report is not None)
    own = {f"{phase}Seconds": round(length) for phase, length in next(filter(None, reports), {}).items()}
    return {"startup": {"pod": name, "totalSeconds": sum(startup.seconds), **phases, **own}}


def _addresses(service: InferenceService, observed: Observed, settings: Settings) -> Iterator[dict[str, str]]:
    """Yield the addresses of the service. The last one is the address for clients."""
    yield {"type": "Internal", "url": internal_url(service, settings)}
    if (balanced := load_balancer_url(observed.children.get(("Service", service.name), {}))) is not None:
        yield {"type": "LoadBalancer", "url": balanced}
    exposure, exposed = service.spec.exposure, exposed_url(service)
    if exposure is not None and exposed is not None:
        yield {"type": "Ingress" if exposure.ingress else "Gateway", "url": exposed}


def _load(observed: Observed) -> dict[str, Any]:
    """The status field `load`, of this service's pods: the router may serve other services, too."""
    pods = [pod.name for pod in observed.pods]
    loads = [report.load_of(pods) for report in observed.routers.values() if report is not None]
    if not loads:
        return {}
    usage = [load.num_used_blocks / load.num_blocks for load in loads if load.num_blocks]
    load: dict[str, Any] = {
        "running": max(load.running for load in loads),
        "waiting": max(load.waiting for load in loads),
    }
    return {"load": load | ({"kvUsage": f"{max(usage):.0%}"} if usage else {})}


def _keep_running(service: InferenceService, observed: Observed, settings: Settings, pace: Pace, *, now: str) -> Steps:
    """Return the actions for a spec that can be read but is not accepted: running pods are scaled and admitted, and no
    other object changes. The reason may be an edit, a new version of the operator, or a router or an API that is gone;
    none of these may turn the next lost node into an outage. The rollout of an existing revision continues, because its
    template was accepted before."""
    if engine_revision(service, settings, live=observed.revisions) in observed.revisions:
        steps = rollout(service, observed, settings, pace, now=now)
    else:
        steps = scale_current(observed, service.spec.replicas, now=now, timeout_s=service.planned_drain_s)
    budget = with_digest(desired_engine_budget(service))  # it counts the wanted replicas
    live = observed.children.get((budget["kind"], budget["metadata"]["name"]))
    changes = () if live is None else child_actions(service, observed, budget, live)
    return Steps((*steps.actions, *changes), steps.drain)
