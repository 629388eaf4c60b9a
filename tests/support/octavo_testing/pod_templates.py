"""Random valid pod templates, of fields that people add to engines and routers."""

from random import Random
from typing import Any

Json = dict[str, Any]
NUM_TEMPLATES = 200


def random_template(seed: int, main: str) -> Json:
    """A template that keeps the Pod Security Standard "restricted" and replaces nothing that the operator needs.

    `main`: name of the operator's container.
    """
    rng = Random(seed)
    volumes = _some(rng, _VOLUMES, at_most=3)
    mounts = [{"name": v["name"], "mountPath": f"/mnt/{v['name']}", "readOnly": rng.random() < 0.5} for v in volumes]
    containers: list[Json] = []
    if mounts or rng.random() < 0.5:
        containers.append(_without_empty({"name": main, "volumeMounts": mounts, **_container_fields(rng, main)}))
    for number in range(rng.randint(0, 2)):
        containers.append({"name": f"side-{number}", "image": "example.test/side:1", **_container_fields(rng, "side")})
    first = [{"name": "prepare", "image": "example.test/prepare:1", "command": ["true"]}] if rng.random() < 0.3 else []
    spec = _without_empty({"volumes": volumes, "containers": containers, "initContainers": first, **_pod_fields(rng)})
    metadata = _without_empty(
        {
            "labels": {"team": "inference"} if rng.random() < 0.3 else {},
            "annotations": {"example.test/note": "a, b"} if rng.random() < 0.3 else {},
        }
    )
    return _without_empty({"metadata": metadata, "spec": spec})


_VOLUMES: tuple[Json, ...] = (
    {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    {"name": "ca", "configMap": {"name": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {"name": "token", "secret": {"secretName": "token", "defaultMode": 256}},
    {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
    {"name": "shared", "csi": {"driver": "csi.example.test", "readOnly": True}},
    {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
)
_ENV: tuple[Json, ...] = (
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}},
    {"name": "HF_HOME", "value": "/mnt/models/huggingface"},
    {"name": "SSL_CERT_FILE", "value": "/mnt/ca/ca.crt"},
    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "token", "key": "key", "optional": True}}},
)
_POD_FIELDS: tuple[Json, ...] = (
    {"serviceAccountName": "own"},
    {"schedulerName": "volcano"},
    {"nodeSelector": {"pool": "gpu"}},
    {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]},
    {"dnsConfig": {"options": [{"name": "ndots", "value": "2"}]}},
    {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["registry.example.test"]}]},
    {"securityContext": {"fsGroup": 20000, "supplementalGroups": [30000]}},
    {"priorityClassName": ""},
    {"imagePullSecrets": [{"name": "registry"}]},
    {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
    {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
)


def _pod_fields(rng: Random) -> Json:
    return {name: value for fields in _some(rng, _POD_FIELDS, at_most=4) for name, value in fields.items()}


def _container_fields(rng: Random, name: str) -> Json:
    return _without_empty(
        {
            "env": _some(rng, _ENV, at_most=3),
            "envFrom": [{"configMapRef": {"name": "settings", "optional": True}}] if rng.random() < 0.3 else [],
            "ports": [{"name": "extra", "containerPort": 9000 + len(name)}] if rng.random() < 0.3 else [],
            "lifecycle": {"preStop": {"exec": {"command": ["true"]}}} if rng.random() < 0.2 else {},
            "resources": {"limits": {"cpu": "2"}} if rng.random() < 0.3 else {},
        }
    )


def _some(rng: Random, items: tuple[Json, ...], *, at_most: int) -> list[Json]:
    return rng.sample(items, rng.randint(0, at_most))


def _without_empty(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value not in ({}, [])}
