"""Finds specs whose pods would have too few or too many devices for the ranks of an engine."""

from octavo_operator.desired.devices import device_of, max_threads, num_gpus, num_whole_gpus
from octavo_operator.plan.conditions import Condition
from octavo_operator.service import InferenceService


def device_fault(service: InferenceService) -> Condition | None:
    """The condition Accepted of a service whose engines would not start, or not use all their GPUs; None if the spec
    shows no such fault."""
    return _gpu_fault(service) if device_of(service) == "cuda" else _cpu_fault(service)


def _gpu_fault(service: InferenceService) -> Condition | None:
    """A service with device cuda that requests no GPU gets GPUs in another way, such as a resource claim."""
    requested, whole, ranks = num_gpus(service), num_whole_gpus(service), service.num_ranks
    if requested > ranks:
        what = f"each replica requests {requested} GPUs, but its engine computes on {ranks}"
        remedy = f"request {ranks}, or set parallelism.tensor to {whole}" if whole > ranks else f"request {ranks}"
        return Condition("Accepted", "UnusedGpus", f"{what}: {remedy}")
    if requested and whole < ranks > 1:
        what = f"parallelism.tensor is {ranks}, and each rank needs a whole GPU, but each replica requests {whole}"
        remedy = f"set nvidia.com/gpu to {ranks} in resources, or lower parallelism.tensor"
        return Condition("Accepted", "TooFewGpus", f"{what}: {remedy}")
    return None


def _cpu_fault(service: InferenceService) -> Condition | None:
    threads, ranks = max_threads(service), service.num_ranks
    if threads is None or threads >= ranks:
        return None
    what = f"parallelism.tensor is {ranks}, and each rank needs a CPU core, but resources.limits.cpu allows {threads}"
    remedy = f"raise it to {ranks} or more, or lower parallelism.tensor"
    return Condition("Accepted", "TooFewCpus", f"{what}: {remedy}")
