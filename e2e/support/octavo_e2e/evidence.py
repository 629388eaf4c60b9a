"""Saves the evidence of a failed test in files: events, objects and logs of all namespaces of the suite."""

import json
from collections.abc import Iterator
from pathlib import Path

from octavo_e2e.cluster import SYSTEM, Cluster

KINDS = "infsvc,deployments,replicasets,pods,services,endpointslices,ingresses,networkpolicies,poddisruptionbudgets"
PREFIX = "e2e-"
TAIL_LINES = 12


def save_evidence(cluster: Cluster, folder: Path) -> str:
    """Save the files, and return their most useful lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for namespace in _namespaces(cluster):
        place = folder / namespace
        place.mkdir(exist_ok=True)
        events = cluster.kubectl("get", "events", "-n", namespace, "--sort-by=.lastTimestamp", check=False)
        (place / "events.txt").write_text(events)
        (place / "objects.yaml").write_text(cluster.kubectl("get", KINDS, "-n", namespace, "-o", "yaml", check=False))
        (place / "pods.txt").write_text(cluster.kubectl("describe", "pods", "-n", namespace, check=False))
        services = cluster.kubectl("get", "infsvc,pods", "-n", namespace, "-o", "wide", check=False)
        lines.append(f"--- {namespace}\n{services}{_last(events)}")
        for name, log in _logs(cluster, namespace):
            (place / f"{name}.log").write_text(log)
            if namespace == SYSTEM:
                lines.append(f"--- {name}\n{_last(log)}")
    return "\n".join([f"all files: {folder}", *lines])


def _namespaces(cluster: Cluster) -> list[str]:
    names = cluster.kubectl("get", "namespaces", "-o", "name", check=False).split()
    return [n for name in names if (n := name.removeprefix("namespace/")) == SYSTEM or n.startswith(PREFIX)]


def _logs(cluster: Cluster, namespace: str) -> Iterator[tuple[str, str]]:
    """Names and logs of all containers, and of their previous instances if they were restarted."""
    found = cluster.kubectl("get", "pods", "-n", namespace, "-o", "json", check=False)
    for pod in json.loads(found or '{"items": []}')["items"]:
        name = pod["metadata"]["name"]
        for container in pod.get("status", {}).get("containerStatuses", []):
            log = ("logs", "-n", namespace, name, "-c", container["name"], "--tail=2000")
            yield f"{name}.{container['name']}", cluster.kubectl(*log, check=False)
            if container["restartCount"]:
                yield f"{name}.{container['name']}.previous", cluster.kubectl(*log, "--previous", check=False)


def _last(text: str) -> str:
    return "\n".join(line[:300] for line in text.splitlines()[-TAIL_LINES:])
