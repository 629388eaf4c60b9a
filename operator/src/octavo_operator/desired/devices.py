"""The device on which a service's engines compute, and the accelerators that its pods request."""

import math
from typing import Literal

from octavo_operator.service import InferenceService
from octavo_operator.spec.quantity import parse_quantity

Device = Literal["cpu", "cuda"]
#: Prefix of NVIDIA's resources: whole GPUs, shared ones (`nvidia.com/gpu.shared`) and MIG (`nvidia.com/mig-1g.5gb`).
NVIDIA = "nvidia.com/"
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


def num_accelerators(service: InferenceService) -> int:
    """Number of accelerators that one replica requests, of any vendor. Partitions and shared GPUs count as one each."""
    found = (amount for name, amount in _requested(service).items() if name.startswith((NVIDIA, *OTHER_VENDORS)))
    return sum(math.ceil(parse_quantity(amount) or 0) for amount in found)


def _requested(service: InferenceService) -> dict[str, str | int]:
    found = service.spec.resources
    return {} if found is None else found.requests | found.limits
