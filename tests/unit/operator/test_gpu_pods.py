"""The pods of services that request GPUs: what GKE, EKS and OpenShift need, and no GPU that stays unused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.devices import num_gpus
from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.names import REVISION_LABEL
from octavo_operator.observed import Observed
from octavo_operator.plan.plan import plan
from octavo_operator.plan.status_conditions import conditions_of
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import KEYS, Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
GPU = {"nvidia.com/gpu": 1}
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "gpu-pods.md"
HUB = {"uri": "hf://Qwen/Qwen3-0.6B"}


def _service(limits: dict[str, Any] | None = None, **spec: Any) -> InferenceService:
    return read_service(stored(Case("", {"resources": {"limits": limits or {}}} | spec, name="llm")))


def _pod(service: InferenceService, settings: Settings = SETTINGS) -> dict[str, Any]:
    """The PodSpec of the engines."""
    pod: dict[str, Any] = desired_engine(service, settings, replicas=1)["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"nvidia.com/gpu": "1000m"}, 1),
        ({"nvidia.com/gpu": "1.0"}, 1),
        ({"nvidia.com/gpu": "1k"}, 1000),
        ({"nvidia.com/gpu": "500m"}, 1),
        ({"nvidia.com/gpu.shared": 1}, 1),
        ({"nvidia.com/mig-1g.10gb": 2}, 2),
        ({"nvidia.com/mig-3g.40gb.shared": 1}, 1),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, 1),
        ({"nvidia.com/gpu": 0}, 0),
        ({"amd.com/gpu": 2, "cpu": 4}, 0),
        ({"example.com/fpga": 1}, 0),
    ],
    ids=str,
)
def test_gpus_of_all_kinds_are_counted(limits: dict[str, Any], count: int) -> None:
    assert num_gpus(_service(limits)) == count


@pytest.mark.parametrize(
    ("limits", "ranks", "engine", "reason", "remedy"),
    [
        ({"nvidia.com/gpu": 1}, 1, {}, "Valid", ""),
        ({"nvidia.com/gpu": 4}, 1, {}, "UnusedGpus", "computes on 1: request 1, or set parallelism.tensor to 4"),
        ({"nvidia.com/mig-1g.10gb": "2"}, 1, {}, "UnusedGpus", "computes on 1: request 1"),
        ({"nvidia.com/gpu": 1, "nvidia.com/hostdev": 1}, 1, {}, "Valid", ""),
        ({"nvidia.com/gpu": 4}, 1, {"device": "cuda"}, "UnusedGpus", "request 1"),
        ({"nvidia.com/gpu": 4}, 1, {"device": "cpu"}, "Valid", ""),
        ({"nvidia.com/gpu": 2}, 2, {}, "Valid", ""),
        ({"nvidia.com/gpu": 3}, 2, {}, "UnusedGpus", "computes on 2: request 2, or set parallelism.tensor to 3"),
        ({"nvidia.com/gpu": 1}, 2, {}, "TooFewGpus", "requests 1: set nvidia.com/gpu to 2"),
        ({"nvidia.com/gpu": "1500m"}, 4, {}, "TooFewGpus", "requests 2: set nvidia.com/gpu to 4"),
        ({"nvidia.com/mig-1g.10gb": 2}, 2, {}, "TooFewGpus", "needs a whole GPU, but each replica requests 0"),
        ({"nvidia.com/gpu.shared": 2}, 2, {}, "TooFewGpus", "needs a whole GPU, but each replica requests 0"),
        ({"nvidia.com/gpu": 1}, 2, {"device": "cpu"}, "Valid", ""),
        ({}, 2, {"device": "cuda"}, "Valid", ""),
        ({"nvidia.com/gpu": 2, "cpu": 1}, 2, {}, "Valid", ""),
    ],
    ids=str,
)
def test_a_service_requests_one_gpu_for_each_rank(
    limits: dict[str, Any], ranks: int, engine: dict[str, Any], reason: str, remedy: str
) -> None:
    _assert_accepted(_service(limits, parallelism={"tensor": ranks}, engine=engine), reason, remedy)


@pytest.mark.parametrize(
    ("limits", "ranks", "engine", "reason"),
    [
        ({"cpu": 2}, 2, {}, "Valid"),
        ({"cpu": "1001m"}, 2, {}, "Valid"),
        ({"cpu": 1}, 2, {}, "TooFewCpus"),
        ({"cpu": "500m"}, 2, {}, "TooFewCpus"),
        ({"cpu": "500m"}, 1, {}, "Valid"),
        ({"cpu": 3, "nvidia.com/gpu": 1}, 4, {"device": "cpu"}, "TooFewCpus"),
        ({"cpu": 0}, 2, {}, "Valid"),
        ({"memory": "8Gi"}, 2, {}, "Valid"),
        ({"cpu": 1}, 2, {"extraArgs": ["--num_threads=2"]}, "Valid"),
        ({"cpu": 1}, 2, {"env": [{"name": "OMP_NUM_THREADS", "value": "2"}]}, "Valid"),
    ],
    ids=str,
)
def test_a_limit_of_cpu_has_a_core_for_each_rank(
    limits: dict[str, Any], ranks: int, engine: dict[str, Any], reason: str
) -> None:
    service = _service(limits, parallelism={"tensor": ranks}, engine=engine)
    _assert_accepted(service, reason, f"raise it to {ranks} or more, or lower parallelism.tensor")


@pytest.mark.parametrize(
    ("limits", "reason", "remedy"),
    [
        ({"cpu": 4}, "Valid", ""),
        ({"cpu": 3}, "TooFewCpus", "raise it to 4 or more, or lower parallelism.tensor or parallelism.pipeline"),
        ({"nvidia.com/gpu": 4}, "StagesOnGpus", "leave it out and divide each layer with parallelism.tensor, or set"),
    ],
    ids=str,
)
def test_stages_have_ranks_on_cpus(limits: dict[str, Any], reason: str, remedy: str) -> None:
    service = _service(limits, parallelism={"tensor": 2, "pipeline": 2})
    _assert_accepted(service, reason, remedy)


def _assert_accepted(service: InferenceService, reason: str, remedy: str) -> None:
    """Assert that the condition Accepted has this reason, and that there are no pods if it is not Valid."""
    found = conditions_of(service, Observed(), SETTINGS, wanted=engine_revision(service, SETTINGS))[0]
    assert (found.type, found.reason) == ("Accepted", reason)
    assert reason == "Valid" or remedy in found.message
    actions = plan(service, Observed(), SETTINGS, now="t", new_secrets=SECRETS).actions
    assert bool(actions) is (reason == "Valid")


@pytest.mark.parametrize(
    ("parallelism", "flags"),
    [
        ({}, []),
        ({"tensor": 1, "pipeline": 1}, []),
        ({"tensor": 2}, ["--tensor-parallel-size=2"]),
        ({"pipeline": 3}, ["--pipeline-parallel-size=3"]),
        ({"tensor": 2, "pipeline": 2}, ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]),
    ],
    ids=str,
)
def test_only_several_ranks_change_the_arguments(parallelism: dict[str, int], flags: list[str]) -> None:
    service, without = _service(parallelism=parallelism), _service()
    found, others = (_pod(each)["containers"][0]["args"] for each in (service, without))
    assert [arg for arg in found if arg not in others] == flags


@pytest.mark.parametrize(
    ("limits", "engine", "is_read_only"),
    [
        ({}, {}, True),
        (GPU, {}, False),
        (GPU, {"device": "cpu"}, False),
        ({"nvidia.com/mig-1g.10gb": 1}, {}, False),
        ({}, {"device": "cuda"}, False),
        ({"amd.com/gpu": 1}, {}, True),
    ],
    ids=str,
)
def test_only_a_container_with_an_nvidia_device_has_a_writable_root(
    limits: dict[str, Any], engine: dict[str, Any], is_read_only: bool
) -> None:
    pod = _pod(_service(limits, engine=engine, model=HUB))
    (engine_container,), (fetch,) = pod["containers"], pod["initContainers"]
    assert engine_container["securityContext"] == fetch["securityContext"] | {"readOnlyRootFilesystem": is_read_only}
    assert fetch["securityContext"]["readOnlyRootFilesystem"] is True
    assert "resources" not in fetch or "nvidia.com/gpu" not in str(fetch["resources"])


def _variables(service: InferenceService) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in _pod(service)["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("cache", "folder"),
    [
        (None, "/var/cache/octavo"),
        ({"mode": "EmptyDir", "size": "20Gi"}, "/var/cache/octavo"),
        ({"mode": "HostPath", "hostPath": "/models"}, "/var/cache/octavo"),
        ({"mode": "PVC", "size": "20Gi"}, "/var/cache/octavo"),
        ({"mode": "PVC", "size": "20Gi", "accessMode": "ReadWriteMany"}, "/tmp"),
        ({"mode": "PVC", "claimName": "mine"}, "/tmp"),
    ],
    ids=str,
)
def test_kernels_are_in_the_cache_volume_unless_it_may_be_a_network_file_system(
    cache: dict[str, Any] | None, folder: str
) -> None:
    found = _variables(_service(GPU, model=HUB | ({} if cache is None else {"cache": cache})))
    assert {name: value for name, value in found.items() if name.endswith(("_CACHE_DIR", "_CACHE_PATH"))} == {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "CUDA_CACHE_PATH": f"{folder}/cuda",
    }


def test_only_engines_that_compute_on_cuda_cache_kernels_and_users_may_choose_where() -> None:
    found, on_cpu = _variables(_service(GPU)), _variables(_service(GPU, engine={"device": "cpu"}))
    assert found.keys() - on_cpu.keys() == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"}
    own = _variables(_service(GPU, engine={"env": [{"name": "TRITON_CACHE_DIR", "value": "/scratch"}]}))
    assert own == found | {"TRITON_CACHE_DIR": "/scratch"}


@pytest.mark.parametrize(
    ("limits", "spec", "size"),
    [
        ({}, {}, None),
        ({}, {"sharedMemory": "2Gi"}, "2Gi"),
        (GPU, {}, "1Gi"),
        (GPU, {"sharedMemory": "64Mi"}, "64Mi"),
        ({"nvidia.com/gpu": 2}, {"parallelism": {"tensor": 2}}, "16Gi"),
        ({}, {"engine": {"device": "cuda"}, "parallelism": {"tensor": 2}}, "16Gi"),
        ({}, {"parallelism": {"tensor": 2}}, None),
        ({"nvidia.com/gpu": 2}, {"engine": {"device": "cpu"}}, "16Gi"),
        ({"nvidia.com/gpu": 8}, {"engine": {"device": "cpu"}, "sharedMemory": "4Gi"}, "4Gi"),
        ({"amd.com/gpu": 1}, {}, None),
    ],
    ids=str,
)
def test_shared_memory_suits_the_number_of_gpus(limits: dict[str, Any], spec: dict[str, Any], size: str | None) -> None:
    pod = _pod(_service(limits, **spec))
    sizes = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "shm"]
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "shm"]
    assert (sizes, mounts) == (([], []) if size is None else ([size], ["/dev/shm"]))


def test_the_page_on_gpu_pods_has_the_template_that_the_operator_makes() -> None:
    given, shown = (yaml.safe_load(block.partition("```")[0]) for block in PAGE.read_text().split("```yaml\n")[1:])
    given["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    settings = replace(SETTINGS, engine_image="REGISTRY/engine:TAG")
    template = desired_engine(read_service(given), settings, replicas=1)["spec"]["template"]
    del template["metadata"]["labels"][REVISION_LABEL]
    assert shown == template


def test_pods_on_a_platform_that_assigns_users_name_no_user() -> None:
    service = _service(GPU, model=HUB, auth=KEYS)
    for settings, users in ((SETTINGS, {10001}), (replace(SETTINGS, has_fixed_user=False), set())):
        routers = [made for made in desired_children(service, settings) if made["kind"] == "Deployment"]
        pods = [_pod(service, settings), *(made["spec"]["template"]["spec"] for made in routers)]
        assert len(pods) == 2
        for pod in pods:
            parts = [pod, *pod["containers"], *pod.get("initContainers", ())]
            contexts = [part["securityContext"] for part in parts]
            found = [context[name] for context in contexts for name in context if name in _USER_FIELDS]
            assert set(found) == users


_USER_FIELDS = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
