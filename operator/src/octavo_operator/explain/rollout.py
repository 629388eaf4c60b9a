"""`octavo rollout`, registered as an entry point: follows, pauses or resumes the rollout of a new revision."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo_operator.explain.cluster_reader import ClusterReader, Unexplained, access

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """`has_ended`: True if the wanted revision alone serves, False if the rollout was stopped, otherwise None."""

    text: str
    has_ended: bool | None = None


def rollout(
    action: Literal["status", "pause", "resume"],
    name: str,
    *,
    namespace: str | None = None,
    kubeconfig: str | None = None,
    context: str | None = None,
    watch: bool = True,
    timeout_s: float = 0.0,
) -> int:
    """Return the exit code: 0 if the rollout is complete, or if the service was paused or resumed. `timeout_s`: longest
    watch; 0 for no limit."""
    try:
        cluster = access(kubeconfig, context)
        with cluster.api:
            reader, where = ClusterReader(cluster), namespace or cluster.namespace
            if action == "status":
                return follow(lambda: reader.service(name, where), watch=watch, timeout_s=timeout_s)
            return _set_paused(reader, name, where, action == "pause")
    except Unexplained as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1


def follow(
    read: Callable[[], Mapping[str, Any]],
    *,
    watch: bool,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print each change of the rollout until it has ended or, without `watch`, once."""
    since_s, before = clock(), None
    while True:
        progress = progress_of(read())
        if progress != before:
            print(progress.text, flush=True)
        if progress.has_ended is not None or not watch:
            return 1 if progress.has_ended is False else 0
        if timeout_s and clock() - since_s >= timeout_s:
            print(f"octavo: the rollout did not end within {timeout_s:g} s (--timeout).", file=sys.stderr)
            return 1
        before = progress
        sleep(EVERY_S)


def progress_of(service: Mapping[str, Any]) -> Progress:
    metadata, status = service["metadata"], service.get("status") or {}
    about = f'infsvc "{metadata["name"]}"'
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        return Progress(f"Waiting for the operator to process the spec of {about}")
    conditions = {row["type"]: row for row in status["conditions"]}
    accepted = conditions["Accepted"]
    deciding = conditions["Progressing"] if accepted["status"] == "True" else accepted
    if deciding["reason"] == "Complete":
        return Progress(f"{about} successfully rolled out", True)
    message = f"{deciding['reason']}: {deciding['message']}"
    if deciding["status"] == "False":
        return Progress(f"{about} is not rolled out: {message}", False)
    replicas = status["replicas"]
    counts = f"{replicas['updated']} of {replicas['desired']} replicas updated, {replicas['ready']} ready"
    return Progress(f"Waiting for the rollout of {about}: {counts}: {message}")


def _set_paused(reader: ClusterReader, name: str, namespace: str, paused: bool) -> int:
    before = reader.service(name, namespace)["spec"].get("rollout") or {}
    if bool(before.get("paused")) is paused:
        print(f'octavo: infsvc "{name}" is {"already paused" if paused else "not paused"}.', file=sys.stderr)
        return 1
    reader.patch_service(name, namespace, {"spec": {"rollout": {"paused": paused or None}}})
    print(f'infsvc "{name}" {"paused" if paused else "resumed"}')
    return 0
