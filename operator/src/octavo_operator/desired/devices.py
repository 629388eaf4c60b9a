"""The device on which a service's engines compute, the accelerators that its pods request, and what these need."""

import math
import re
from typing import Literal

from octavo_operator.desired.objects import CONTAINER_SECURITY, Manifest
from octavo_operator.desired.weights import CACHE_PATH
from octavo_operator.service import InferenceService
from octavo_operator.spec.quantity import parse_quantity

Device = Literal["cpu", "cuda"]
#: Prefix of NVIDIA's resources.
NVIDIA = "nvidia.com/"
#: NVIDIA's resources that count GPUs: whole ones, shared ones and MIG partitions. Others count memory or NICs.
_NVIDIA_GPUS = re.compile(r"nvidia\.com/(gpu(\.shared)?|mig-.+)")
#: Folders of compiled kernels, in the environment of Triton, Inductor and the driver.
KERNEL_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
#: Size of /dev/shm for one GPU, and for several, between which NCCL exchanges data there. Both are limits: memory is
#: only taken as it is used.
SHARED_MEMORY, SHARED_MEMORY_OF_SEVERAL = "1Gi", "16Gi"
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


def device_environment(service: InferenceService) -> list[Manifest]:
    """Environment variables for engines that compute on cuda.

    The kernels are in the cache volume, so that later pods find them. A volume that may be a network file system has
    none: Triton fails if processes compile into one folder there at once (triton#11512), and the driver locks files.
    """
    if device_of(service) != "cuda":
        return []
    cache = service.spec.model.cache
    is_local = cache is None or cache.mode != "PVC" or (cache.is_created and cache.access_mode != "ReadWriteMany")
    folder = CACHE_PATH if is_local else "/tmp"
    return [{"name": name, "value": f"{folder}/{path}"} for name, path in KERNEL_CACHES.items()]


def container_security(service: InferenceService) -> Manifest:
    """Security context of the engine's container. Hooks of NVIDIA's container toolkit, which runs them for a container
    with a GPU, write into its root file system (kserve#5711)."""
    return CONTAINER_SECURITY | {"readOnlyRootFilesystem": not _gets_nvidia(service)}


def shared_memory_volume(service: InferenceService) -> list[Manifest]:
    """The volume for /dev/shm; none for the container runtime's own, which has 64 MiB."""
    default = SHARED_MEMORY_OF_SEVERAL if num_gpus(service) > 1 else SHARED_MEMORY
    size = service.spec.shared_memory or (default if _gets_nvidia(service) else None)
    return [] if size is None else [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]


def _gets_nvidia(service: InferenceService) -> bool:
    """Return whether engine containers get an NVIDIA device, also one on which the engine does not compute."""
    return service.spec.engine.device == "cuda" or any(name.startswith(NVIDIA) for name in _requested(service))


def _requested(service: InferenceService) -> dict[str, str | int]:
    """Requested resources, without those of which nothing is requested."""
    resources = service.spec.resources
    amounts = {} if resources is None else resources.requests | resources.limits
    return {name: amount for name, amount in amounts.items() if parse_quantity(amount)}
