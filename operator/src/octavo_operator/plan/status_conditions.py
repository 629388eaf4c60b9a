"""Derives the conditions of a service from its observed state, each with a reason and a message for its owner."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_operator.desired.devices import device_of, unsupported_accelerators
from octavo_operator.observed import ModelSize, Observed, Pod, Trouble
from octavo_operator.plan.acceptance import accepted_condition
from octavo_operator.plan.conditions import REASONS, Condition, ready
from octavo_operator.plan.rollout import STEADY, Pace, is_complete
from octavo_operator.plan.scaling_condition import scaling_condition
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.fields import num_bytes
from octavo_operator.spec.quantity import parse_quantity

#: Codes of the engine's termination message (`StartupCode` of the engine); a test keeps them equal.
OUT_OF_MEMORY, MODEL_NOT_FOUND, NO_DEVICE = "OutOfMemory", "ModelNotFound", "NoDevice"
#: Troubles that occur only after the weights were fetched.
_WITH_WEIGHTS: tuple[Trouble, ...] = ("OOMKilled", "CrashLoop", "StartFailed")
_MIB = 2**20
#: Order in which troubles are reported: those that a person must solve come before those that may pass by themselves.
_TROUBLES: tuple[Trouble, ...] = (
    "ConfigError",
    "MountFailed",
    "ImagePullError",
    "OOMKilled",
    "CrashLoop",
    "StartFailed",
    "NodeLost",
    "Unschedulable",
)


def conditions_of(
    service: InferenceService, observed: Observed, settings: Settings, *, wanted: str, pace: Pace = STEADY
) -> list[Condition]:
    is_group = service.num_nodes > 1  # a StatefulSet replaces no pod of a lost node until the node is back or deleted
    staying = [p for p in observed.pods if not p.is_terminating or (is_group and p.trouble == "NodeLost")]
    is_any_shown = pace.is_held or pace.reason == "DeadlineExceeded"
    pods = [pod for pod in staying if pod.revision == wanted or is_any_shown]
    parts = [part for pod in pods for part in pod.parts]
    complete = is_complete(service, observed, wanted)
    accepted = accepted_condition(service, observed, settings)
    engine = (
        _fits(service, parts, size_of(observed, pods)),
        _model(service, observed, parts),
        _workload(service, observed, pods, wanted=wanted),
    )
    conditions = [
        accepted,
        _applied(accepted, observed),
        *(_keep_failure(condition, observed, parts, wanted=wanted) for condition in engine),
        _router(observed),
        _admitted(service, observed, pace),
        _progressing(observed, pace, wanted=wanted, complete=complete),
        *scaling_condition(service, observed, settings),
    ]
    message = f"{sum(pod.serves for pod in staying)} replicas serve requests through the router"
    return [*conditions, ready(conditions, message=message)]


def refused(message: str) -> list[Condition]:
    """Conditions of a service whose spec can't be read."""
    accepted = Condition("Accepted", "InvalidSpec", message)
    return [accepted, ready([accepted], message="")]


def _applied(accepted: Condition, observed: Observed) -> Condition:
    if accepted.status != "True":
        return Condition(
            "ChildrenApplied", "NotTried", "while the spec can't be served, the operator only scales and admits pods"
        )
    order = sorted(observed.refusals.items(), key=lambda item: item[1].reason == "Retrying")
    for (kind, name), refusal in order:
        return Condition("ChildrenApplied", refusal.reason, f"{kind} {name}: {refusal.message}")
    return Condition("ChildrenApplied", "Applied", "all objects of this service match its spec")


def size_of(observed: Observed, pods: Sequence[Pod]) -> ModelSize | None:
    """Model size of these pods, as any of them reports it: all pods of one revision have the same size."""
    reports = [report for report in observed.routers.values() if report is not None]
    sizes = [report.sizes[pod.name] for report in reports for pod in pods if pod.name in report.sizes]
    return sizes[0] if sizes else None


def model_revisions(observed: Observed, pods: Sequence[Pod]) -> dict[str, int]:
    """Versions of the downloaded model -> number of these pods that serve it, the most frequent version first. They
    differ if a branch or bucket has changed between two starts."""
    reported: dict[str, str] = {}
    for report in observed.routers.values():
        reported |= {} if report is None else report.revisions
    counted = Counter(sorted(reported[pod.name] for pod in pods if pod.name in reported))
    return dict(counted.most_common())


def _fits(service: InferenceService, pods: Sequence[Pod], size: ModelSize | None) -> Condition:
    if others := unsupported_accelerators(service):
        what = f"no engine can compute on {', '.join(others)}, so these engines compute on the CPU"
        remedy = "request nvidia.com/gpu, or none and set engine.device to cpu"
        return Condition("FitsHardware", "NoGpuSupport", f"{what}: {remedy}")
    for pod in pods:
        if pod.failure_code == NO_DEVICE:
            return Condition("FitsHardware", "NoGpuSupport", f"{pod.name}: {pod.message}")
        if pod.failure_code == OUT_OF_MEMORY:
            return Condition("FitsHardware", "TooLarge", f"{pod.name}: {pod.message}")
    if size is not None:
        return Condition("FitsHardware", "Fits", _sum(size))
    if any(pod.is_ready for pod in pods):
        return Condition("FitsHardware", "Fits", "the engine has room for its weights and KV cache")
    if beyond := _beyond_limit(service):
        return Condition("FitsHardware", "TooLarge", beyond)
    return Condition("FitsHardware", "NotChecked", "no engine has started yet")


def _beyond_limit(service: InferenceService) -> str:
    """Message if the sizes in the spec exceed the container's memory limit, which without a GPU covers the KV cache."""
    engine, resources = service.spec.engine, service.spec.resources
    limit = None if resources is None else parse_quantity(resources.limits.get("memory", ""))
    asked = {"kvCacheMemory": engine.kv_cache_memory, "swapSpace": engine.swap_space}
    ranks = service.num_local_ranks
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    parts = [f"engine.{name} {size}{each}" for name, size in asked.items() if size is not None]
    total = ranks * sum(num_bytes(size) for size in asked.values() if size is not None)
    if limit is None or device_of(service) == "cuda" or total < limit:
        return ""
    return (
        f"the spec does not fit: {' and '.join(parts)} take {total / _MIB:,.0f} MiB, and the container's memory limit, "
        f"for weights, too, is {int(limit) / _MIB:,.0f} MiB: raise resources.limits.memory, or lower those values"
    )


def _sum(size: ModelSize) -> str:
    weights, cache = (f"{taken / _MIB:,.0f} MiB" for taken in (size.weights_bytes, size.kv_bytes))
    at_once = size.kv_tokens / size.max_model_len
    return (
        f"weights {weights}, KV cache {cache}: {size.kv_tokens:,} tokens, room for {at_once:,.1f} requests of full "
        f"length ({size.max_model_len:,} tokens) at once"
    )


def _model(service: InferenceService, observed: Observed, pods: Sequence[Pod]) -> Condition:
    failed = next((pod for pod in pods if pod.trouble == "FetchFailed"), None)
    if failed is not None:
        return Condition("ModelReady", "FetchFailed", f"{failed.name}: {failed.message}")
    absent = next((pod for pod in pods if pod.failure_code == MODEL_NOT_FOUND), None)
    if absent is not None:
        return Condition("ModelReady", "NotFound", f"{absent.name}: {absent.message}")
    if any(pod.is_fetching for pod in pods):
        return Condition("ModelReady", "Fetching", f"a pod is fetching {service.spec.model.uri}")
    if any(pod.is_ready or pod.restarts or pod.trouble in _WITH_WEIGHTS for pod in pods) or not service.spec.replicas:
        counts = model_revisions(observed, pods)
        listed = ", ".join(f"{revision} ({count})" for revision, count in counts.items())
        differing = f"; engines serve different versions of it: {listed}" if len(counts) > 1 else ""
        return Condition("ModelReady", "Fetched", f"{service.spec.model.uri} is available to the engines{differing}")
    return Condition("ModelReady", "Waiting", f"no pod has begun to fetch {service.spec.model.uri}")


def _workload(service: InferenceService, observed: Observed, pods: Sequence[Pod], *, wanted: str) -> Condition:
    replicas = service.spec.replicas
    if replicas == 0:
        return Condition("WorkloadReady", "ScaledToZero", "spec.replicas is 0")
    num_ready = sum(pod.is_ready for pod in pods)
    if num_ready >= replicas:
        return Condition("WorkloadReady", "PodsReady", f"{num_ready} of {replicas} engines are ready")
    refused = next((s for s in observed.engine_deployments if s.revision == wanted and s.failure), None)
    num_pods = replicas * service.num_nodes
    missing = num_pods - sum(len(pod.parts) for pod in pods)
    if refused is not None and missing > 0:
        reason = "QuotaExceeded" if refused.exceeds_quota else "PodRefused"
        message = f"{missing} of {num_pods} pods can't be created: {refused.failure}"
        return Condition("WorkloadReady", reason, message)
    for trouble in _TROUBLES:
        found = [next((cause for cause in pod.causes if cause.trouble == trouble), None) for pod in pods]
        if causes := list(filter(None, found)):
            what = f"{len(causes)} of {replicas} engines are not ready for this reason"
            return Condition("WorkloadReady", trouble, f"{what}: {causes[0].name}: {causes[0].message}")
    return Condition("WorkloadReady", "Starting", f"{num_ready} of {replicas} engines are ready so far")


def _keep_failure(condition: Condition, observed: Observed, pods: Sequence[Pod], *, wanted: str) -> Condition:
    """Keep the failure that the status has while a restarted pod shows none: between two starts of a container, the
    kubelet may report no reason."""
    if condition.status == "False" or any(pod.is_ready for pod in pods):
        return condition
    shows_no_reason = any(pod.restarts and pod.trouble is None for pod in pods)
    row = _status_rows(observed, wanted).get(condition.type, {})
    if not shows_no_reason or REASONS[condition.type].get(row.get("reason", "")) != "False":
        return condition
    return Condition(condition.type, row["reason"], row["message"])


def _router(observed: Observed) -> Condition:
    if observed.routers and observed.router_trouble:
        what = f"{len(observed.routers)} routers are ready, another one does not start: {observed.router_trouble}"
        return Condition("RouterReady", "RouterDegraded", what)
    if observed.routers:
        return Condition("RouterReady", "RouterServes", f"{len(observed.routers)} routers are ready")
    if observed.router_trouble:
        return Condition("RouterReady", "RouterFailed", observed.router_trouble)
    return Condition("RouterReady", "RouterStarting", "no router is ready yet")


def _admitted(service: InferenceService, observed: Observed, pace: Pace) -> Condition:
    """The condition ReplicasAdmitted, for replicas of any revision. A rollout in place goes with one replica less."""
    serving, replicas = sum(pod.serves for pod in observed.pods), service.spec.replicas
    scaling = service.spec.autoscaling
    if replicas == 0 and scaling is not None and scaling.scale_to_zero is not None:
        return Condition("ReplicasAdmitted", "Idle", "no replica runs without requests: the next request starts one")
    if replicas == 0:
        return Condition("ReplicasAdmitted", "NoReplicas", "spec.replicas is 0: raise it to serve requests")
    if serving >= max(1, replicas - pace.in_place):
        return Condition("ReplicasAdmitted", "AllAdmitted", f"{serving} of {replicas} engines receive requests")
    return Condition("ReplicasAdmitted", "WaitingForRouter", f"{serving} of {replicas} engines receive requests so far")


def _progressing(observed: Observed, pace: Pace, *, wanted: str, complete: bool) -> Condition:
    """The condition Progressing. A revision that was complete once stays complete; other conditions report its pods."""
    others = sorted({s.revision for s in observed.engine_deployments if s.revision != wanted})
    if not others and (complete or _was_complete(observed, wanted)):
        return Condition("Progressing", "Complete", f"revision {wanted} is the only revision")
    if pace.reason != "RollingOut":
        return Condition("Progressing", pace.reason, pace.why)
    what = "is starting"
    if others:
        what = f"{'replaces' if pace.in_place else 'is starting beside'} {', '.join(others)}"
    return Condition("Progressing", "RollingOut", f"revision {wanted} {what}")


def _was_complete(observed: Observed, wanted: str) -> bool:
    return _status_rows(observed, wanted).get("Progressing", {}).get("reason") == "Complete"


def _status_rows(observed: Observed, wanted: str) -> dict[str, Mapping[str, Any]]:
    """Conditions in the status by type; empty if the status describes another revision than `wanted`."""
    if observed.status.get("revision", {}).get("updated") != wanted:
        return {}
    return {row["type"]: row for row in observed.status.get("conditions", ())}
