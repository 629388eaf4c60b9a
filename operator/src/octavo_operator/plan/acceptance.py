"""Decides whether a service can be served as its spec asks: the condition Accepted, with the remedy if it can't be."""

from octavo_operator.desired.devices import device_of, max_threads, num_gpus, num_whole_gpus
from octavo_operator.desired.engine import template_conflicts
from octavo_operator.desired.node_rights import node_rights
from octavo_operator.desired.router import router_template_conflicts
from octavo_operator.observed import Observed
from octavo_operator.plan.cache_claim import differences, is_for_one_node, live_claim
from octavo_operator.plan.conditions import Condition
from octavo_operator.service import InferenceService, Settings


def accepted_condition(service: InferenceService, observed: Observed, settings: Settings) -> Condition:
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
