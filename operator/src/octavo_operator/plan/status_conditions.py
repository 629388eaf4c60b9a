"""Derives the conditions of a service from its observed state, each with a reason and a message for its owner."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_operator.desired.devices import device_of, max_threads, num_gpus, num_whole_gpus, unsupported_accelerators
from octavo_operator.desired.engine import template_conflicts
from octavo_operator.desired.node_rights import node_rights
from octavo_operator.desired.router import router_template_conflicts
from octavo_operator.observed import ModelSize, Observed, Pod, Trouble
from octavo_operator.plan.cache_claim import differences, is_for_one_node, live_claim
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
    accepted = _accepted(service, observed, settings)
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


def _accepted(service: InferenceService, observed: Observed, settings: Settings) -> Condition:
    ref = service.spec.router.ref
    if ref is not None and observed.router_owner is None:
        what = (
            f"spec.router.ref names {ref.name!r}, but no InferenceService of this name in this namespace has a router"
        )
        return Condition("Accepted", "RouterNotFound", f"{what} of its own: create it, or correct the name")
    if ref is not None and not observed.may_use_router:
        what = f"InferenceService {ref.name} has the router, and its spec.router.allowFrom does not list {service.name}"
        remedy = "add it there, or leave spec.router.ref out, so that this service has a router of its own"
        return Condition("Accepted", "RouterNotAllowed", f"{what}: {remedy}")
    if observed.host_owner is not None:
        what = f"the host and path of spec.exposure belong to {observed.host_owner}"
        remedy = "choose another host or path, or share its router (spec.router.ref.name)"
        return Condition("Accepted", "HostTaken", f"{what}: {remedy}")
    models = {name: owner for name, owner in observed.taken_models.items() if name not in service.adapter_names}
    for name, owner in models.items():
        what = f"the model name {name!r} belongs to InferenceService {owner}, which has the same router"
        return Condition("Accepted", "ModelNameTaken", f"{what}: choose another name in model.servedNames")
    exposure = service.spec.exposure
    if exposure is not None and exposure.gateway is not None and not settings.has_gateway_api:
        what = "spec.exposure.gateway needs the Gateway API, but the operator was installed without it"
        return Condition("Accepted", "NoGatewayApi", f"{what}: set gatewayApi.enabled of the chart, or use an ingress")
    if service.num_nodes > 1 and not settings.has_group_sets:
        what = "parallelism.nodes above 1 needs LeaderWorkerSets, and this cluster or this installation has none"
        remedy = "install LeaderWorkerSet, set leaderWorkerSets.enabled of the chart, or leave parallelism.nodes out"
        return Condition("Accepted", "NoLeaderWorkerSets", f"{what}: {remedy}")
    if taken := _template_conflicts(service, settings):
        what = f"the operator itself sets {', '.join(taken)}"
        remedy = "leave these out, and use the fields of the spec (engine, router, model, drain) that stand for them"
        return Condition("Accepted", "PodTemplateConflict", f"{what}: {remedy}")
    if settings.restricts_pods and (fields := node_rights(service)):
        what = f"{', '.join(fields)}: this installation refuses fields that give a pod rights on its node"
        remedy = "leave them out, or let the administrator set podTemplates of the chart to any"
        return Condition("Accepted", "PodTemplateRefused", f"{what}; {remedy}")
    if (fault := _device_fault(service)) is not None:
        return fault
    claim = live_claim(service, observed)
    most = max(service.spec.replicas, service.spec.autoscaling.max_replicas if service.spec.autoscaling else 0)
    if most * service.num_nodes > 1 and is_for_one_node(service, claim):
        what = f"{most * service.num_nodes} pods share a ReadWriteOnce claim, so they start on one node only"
        remedy = "create the service with model.cache.accessMode ReadWriteMany, if its StorageClass supports that"
        return Condition("Accepted", "ClaimIsForOneNode", f"{what}: {remedy}")
    if claim is not None and (unlike := differences(service, claim)):
        what = f"claim {claim['metadata']['name']} exists and stays unchanged; it differs in {', '.join(unlike)}"
        remedy = "change the spec, or delete the claim together with the service and create the service again"
        return Condition("Accepted", "ClaimDiffers", f"{what}: {remedy}")
    return Condition("Accepted", "Valid", "the spec can be served")


def _template_conflicts(service: InferenceService, settings: Settings) -> list[str]:
    paths = [f"engine.podTemplate.{path}" for path in template_conflicts(service, settings)]
    if service.owns_router:
        paths += [f"router.podTemplate.{path}" for path in router_template_conflicts(service, settings)]
    return paths


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


def _device_fault(service: InferenceService) -> Condition | None:
    """The condition Accepted of a service whose engines would not start, or not use all their GPUs; None if the spec
    shows no such fault."""
    if device_of(service) != "cuda":
        return _cpu_fault(service)
    if service.num_stages > 1:
        what = f"parallelism.pipeline is {service.num_stages}, but stages run on CPUs only"
        remedy = "leave it out and divide each layer with parallelism.tensor, or set engine.device to cpu"
        return Condition("Accepted", "StagesOnGpus", f"{what}: {remedy}")
    return _gpu_fault(service)


def _gpu_fault(service: InferenceService) -> Condition | None:
    """A service with device cuda that requests no GPU gets GPUs in another way, such as a resource claim."""
    requested, whole, ranks = num_gpus(service), num_whole_gpus(service), service.num_local_ranks
    owner = "replica" if service.num_nodes == 1 else "pod"
    if requested > ranks:
        what, tensor = (
            f"each {owner} requests {requested} GPUs, but its engine computes on {ranks}",
            whole * service.num_nodes,
        )
        remedy = f"request {ranks}, or set parallelism.tensor to {tensor}" if whole > ranks else f"request {ranks}"
        return Condition("Accepted", "UnusedGpus", f"{what}: {remedy}")
    if requested and whole < ranks > 1:
        what = f"{_ranks_of(service)}, and each rank needs a whole GPU, but each {owner} requests {whole}"
        remedy = f"set nvidia.com/gpu to {ranks} in resources, or lower parallelism.tensor"
        return Condition("Accepted", "TooFewGpus", f"{what}: {remedy}")
    return None


def _cpu_fault(service: InferenceService) -> Condition | None:
    threads, ranks = max_threads(service), service.num_local_ranks
    if threads is None or threads >= ranks:
        return None
    what = f"{_ranks_of(service)}, and each rank needs a CPU core, but resources.limits.cpu allows {threads}"
    lowered = "parallelism.tensor" if service.num_stages == 1 else "parallelism.tensor or parallelism.pipeline"
    remedy = f"raise it to {ranks} or more, or lower {lowered}"
    return Condition("Accepted", "TooFewCpus", f"{what}: {remedy}")


def _ranks_of(service: InferenceService) -> str:
    tensor, sizes = (
        service.num_ranks // service.num_stages,
        {"pipeline": service.num_stages, "nodes": service.num_nodes},
    )
    others = (f"parallelism.{name} is {size}" for name, size in sizes.items() if size > 1)
    return " and ".join([f"parallelism.tensor is {tensor}", *others])
