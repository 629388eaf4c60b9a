"""The device on which a service's engines compute, and the accelerators that its pods request."""

import math
import re
from typing import Literal

from octavo_operator.service import InferenceService
from octavo_operator.spec.quantity import parse_quantity

Device = Literal["cpu", "cuda"]
#: Prefix of NVIDIA's resources.
NVIDIA = "nvidia.com/"
#: NVIDIA's resources that count GPUs: whole ones, shared ones and MIG partitions. Others count memory or network devices.
_NVIDIA_GPUS = re.compile(r"nvidia\.com/(gpu(\.shared)?|mig-.+)")
#: Prefixes of other vendors' accelerators, on which no engine can compute.
OTHER_VENDORS = ("amd.com/gpu", "gpu.intel.com/", "habana.ai/", "google.com/tpu", "aws.amazon.com/neuron")


def device_of(service: InferenceService) -> Device:
    """`engine.device`; by default cuda if the pods request an NVIDIA GPU, else cpu."""
    requested = any(name.startswith(NVIDIA) for name in _requested(service))
    return service.spec.engine.device or ("cuda" if requested else "cpu")


def unsupported_accelerators(service: InferenceService) -> list[str]:
    """Requested resources of other vendors. Empty if `engine.device` is set: that it is not used is then intended."""
    if service.spec.engine.device is not None:
        return []
    return sorted(name for name in _requested(service) if name.startswith(OTHER_VENDORS))


def num_gpus(service: InferenceService) -> int:
    """Number of NVIDIA GPUs that one replica requests. Partitions and shared GPUs count as one each."""
    return sum(
        math.ceil(parse_quantity(amount) or 0)
        for name, amount in _requested(service).items()
        if _NVIDIA_GPUS.fullmatch(name)
    )


def num_unused_gpus(service: InferenceService) -> int:
    """Number of requested GPUs on which an engine with device cuda would not compute."""
    parallelism = service.spec.parallelism
    used = (parallelism.tensor or 1) * (parallelism.pipeline or 1)
    return max(0, num_gpus(service) - used) if device_of(service) == "cuda" else 0


def _requested(service: InferenceService) -> dict[str, str | int]:
    """Requested resources, without those of which nothing is requested."""
    found = service.spec.resources
    amounts = {} if found is None else found.requests | found.limits
    return {name: amount for name, amount in amounts.items() if parse_quantity(amount)}
