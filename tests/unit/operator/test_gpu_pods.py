"""The pods of services that request GPUs: what GKE, EKS and OpenShift need, and no GPU that the engine leaves unused."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.devices import num_gpus
from octavo_operator.desired.engine import desired_engine, engine_revision
from octavo_operator.names import ENGINE
from octavo_operator.observed import Observed
from octavo_operator.plan.plan import plan
from octavo_operator.plan.status_conditions import conditions_of
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import KEYS, Case, stored

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
GPU = {"nvidia.com/gpu": 1}
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
    ("limits", "engine", "reason"),
    [
        ({"nvidia.com/gpu": 1}, {}, "Valid"),
        ({"nvidia.com/gpu": 4}, {}, "UnusedGpus"),
        ({"nvidia.com/mig-1g.10gb": "2"}, {}, "UnusedGpus"),
        ({"nvidia.com/gpu": 1, "nvidia.com/hostdev": 1}, {}, "Valid"),
        ({"nvidia.com/gpu": 4}, {"device": "cuda"}, "UnusedGpus"),
        ({"nvidia.com/gpu": 4}, {"device": "cpu"}, "Valid"),
    ],
    ids=str,
)
def test_a_service_holds_no_gpu_that_its_engine_leaves_unused(
    limits: dict[str, Any], engine: dict[str, Any], reason: str
) -> None:
    service = _service(limits, engine=engine)
    found = conditions_of(service, Observed(), SETTINGS, wanted=engine_revision(service, SETTINGS))[0]
    assert (found.type, found.reason) == ("Accepted", reason)
    assert reason == "Valid" or "computes on 1" in found.message
    actions = plan(service, Observed(), SETTINGS, now="t", new_secret="s").actions
    assert bool(actions) is (reason == "Valid")
