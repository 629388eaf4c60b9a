"""Wakes of a service from zero replicas, by phase: from a request to its first token.

The service must be installed in the cluster of kubectl's context, with `autoscaling.scaleToZero`. Before each wake the
script waits until no pod of an engine is left. It then sends one streamed request and watches the pod's status: a phase
ends when the script sees its end.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from openai import OpenAI
from table import Samples, print_table, save_json

GONE_S = 600.0
WATCH_S = 1.0  # until kubectl watches, and until it has printed the last event
LABELS = "serving.octavo.dev/service={},app.kubernetes.io/component=engine"
#: Phase -> condition of the pod that ends it, or None for the container's start.
PHASES: dict[str, str | None] = {
    "schedule": "PodScheduled",
    "fetch": "Initialized",
    "pull": None,
    "load": "ContainersReady",
    "admit": "Ready",
}


def kubectl(*args: str) -> Any:
    """Run kubectl and return the JSON that it prints."""
    return json.loads(subprocess.run(["kubectl", *args, "-o", "json"], check=True, capture_output=True).stdout)


def pods(namespace: str, service: str) -> list[Any]:
    found: list[Any] = kubectl("get", "pods", "-n", namespace, "-l", LABELS.format(service))["items"]
    return found


def wait_for_sleep(namespace: str, service: str) -> None:
    deadline = time.monotonic() + GONE_S
    while pods(namespace, service):
        if time.monotonic() > deadline:
            raise SystemExit(f"{namespace}/{service} still has engines after {GONE_S:.0f} s: does it have scaleToZero?")
        time.sleep(1.0)


def reached(pod: Any) -> Iterator[str]:
    """Yield the phases that have ended."""
    status = pod.get("status", {})
    true = {row["type"] for row in status.get("conditions", ()) if row["status"] == "True"}
    runs = any("running" in container.get("state", {}) for container in status.get("containerStatuses", ()))
    for phase, condition in PHASES.items():
        if runs if condition is None else condition in true:
            yield phase


def first_token(client: OpenAI, model: str) -> float:
    """Send a request; return the time of its first token."""
    with client.completions.create(model=model, prompt="Once upon a time", max_tokens=2, stream=True) as stream:
        next(iter(stream))
        return time.monotonic()


def follow(lines: Iterable[str], ends: dict[str, float]) -> None:
    """Add the time at which each phase ends. `lines`: a pod on each, as kubectl prints its events."""
    for line in lines:
        for name in ("create", *reached(json.loads(line))):
            ends.setdefault(name, time.monotonic())


def measure_wake(client: OpenAI, namespace: str, service: str, model: str) -> dict[str, float]:
    """Return the seconds of each phase of one wake."""
    wait_for_sleep(namespace, service)
    command = ["kubectl", "get", "pods", "-n", namespace, "-l", LABELS.format(service), "--watch-only"]
    with (
        subprocess.Popen([*command, "-o", 'jsonpath={@}{"\\n"}'], stdout=subprocess.PIPE, text=True) as watching,
        ThreadPoolExecutor(1) as pool,
    ):
        assert watching.stdout is not None
        ends: dict[str, float] = {}
        followed = pool.submit(follow, watching.stdout, ends)
        time.sleep(WATCH_S)
        ends["request"] = time.monotonic()
        ends["first token"] = first_token(client, model)
        time.sleep(WATCH_S)
        watching.terminate()
        followed.result()
    order = [name for name in ("request", "create", *PHASES, "first token") if name in ends]
    seconds = {name: max(0.0, ends[name] - ends[before]) for before, name in pairwise(order)}
    return seconds | {"total": ends["first token"] - ends["request"]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure wakes of a service from zero replicas, by phase.")
    parser.add_argument("--url", required=True, help="address of the service, such as http://10.96.0.7")
    parser.add_argument("--namespace", default="default", help="namespace of the service (default: %(default)s)")
    parser.add_argument("--model", help="model name in the requests (default: the name of the service)")
    parser.add_argument("--wakes", type=int, default=10, metavar="N", help="number of wakes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every sample to this file")
    parser.add_argument("service", help="name of the InferenceService")
    given = parser.parse_args()
    wakes: list[dict[str, float]] = []
    with OpenAI(base_url=f"{given.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for number in range(given.wakes):
            found = measure_wake(client, given.namespace, given.service, given.model or given.service)
            print(f"wake {number + 1}:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()))
            wakes.append(found)
    names = ("create", *PHASES, "first token", "total")
    samples = {name: Samples(tuple(wake[name] for wake in wakes if name in wake)) for name in names}
    print_table("seconds until each phase ended", ("phase", "seconds"), [*samples.items()])
    save_json(given.json, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
