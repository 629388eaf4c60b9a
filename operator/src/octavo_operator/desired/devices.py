"""The device on which a service's engines compute, the accelerators that its pods request, and their settings."""

import math
import re
from typing import Literal

from octavo_operator.desired.objects import CONTAINER_SECURITY, Manifest
from octavo_operator.desired.weights import CACHE_PATH
from octavo_operator.service import InferenceService
from octavo_operator.spec.engine import sets_any
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
#: Variables by which users set the number of an engine's CPU threads.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
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
    """Number of NVIDIA GPUs that one pod requests. Partitions and shared GPUs count as one each."""
    return sum(
        math.ceil(parse_quantity(amount) or 0)
        for name, amount in _requested(service).items()
        if _NVIDIA_GPUS.fullmatch(name)
    )


def num_whole_gpus(service: InferenceService) -> int:
    """Number of whole NVIDIA GPUs that one pod requests. Several ranks need whole GPUs, because NCCL connects neither
    partitions nor processes that share a GPU."""
    return math.ceil(parse_quantity(_requested(service).get("nvidia.com/gpu", 0)) or 0)


def max_threads(service: InferenceService) -> int | None:
    """Number of CPU threads that an engine starts under the limit of its container, as the engine computes it. None
    without a limit, and where the user has set the number."""
    engine, found = service.spec.engine, service.spec.resources
    limit = None if found is None else parse_quantity(found.limits.get("cpu", 0))
    is_set = sets_any(engine.extra_args, "--num-threads") or any(v.name in _THREAD_VARIABLES for v in engine.env)
    return math.ceil(limit) if limit and not is_set else None


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


def shared_memory(service: InferenceService) -> tuple[list[Manifest], list[Manifest]]:
    """The mounts and volumes for /dev/shm; empty if the container runtime's own /dev/shm (64 MiB) suffices."""
    has_several = num_gpus(service) > 1 or service.num_local_ranks > 1
    default = SHARED_MEMORY_OF_SEVERAL if has_several else SHARED_MEMORY
    size = service.spec.shared_memory or (default if _gets_nvidia(service) else None)
    if size is None:
        return [], []
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return [{"name": "shm", "mountPath": "/dev/shm"}], [volume]


def _gets_nvidia(service: InferenceService) -> bool:
    """Return whether engine containers get an NVIDIA device, also one on which the engine does not compute."""
    return service.spec.engine.device == "cuda" or any(name.startswith(NVIDIA) for name in _requested(service))


def _requested(service: InferenceService) -> dict[str, str | int]:
    """Requested resources, without those whose amount is 0."""
    resources = service.spec.resources
    amounts = {} if resources is None else resources.requests | resources.limits
    return {name: amount for name, amount in amounts.items() if parse_quantity(amount)}
