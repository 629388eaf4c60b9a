"""`Release`: installs the chart as in the README, upgrades and removes it."""

import json
import os
from collections.abc import Sequence

from octavo_e2e.cluster import SYSTEM, Cluster

NAME = "octavo"
CRD = "inferenceservices.serving.octavo.dev"
SELECTOR = "app.kubernetes.io/name=octavo-operator"
ACCOUNT = f"{SYSTEM}:octavo-operator"
UP_S = 600
#: Some tests keep weights on the node.
_POD_TEMPLATES = ("--set", "podTemplates=any")


class Release:
    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def install(self, *values: str) -> Sequence[str]:
        """Install the chart, or upgrade a release that an earlier run has kept. Returns helm's arguments.

        A release whose installation or removal was interrupted can't be upgraded, so it is removed first.
        """
        listed = self._cluster.helm("list", "--all", "-n", SYSTEM, "--filter", f"^{NAME}$", "-o", "json")
        match [release["status"] for release in json.loads(listed)]:
            case ["deployed"]:
                return self.upgrade(*values)
            case [_]:
                self.remove()
        self._clear_leftover_crd()
        command = ("install", NAME, "charts/octavo", "-n", SYSTEM, "--create-namespace")
        self._cluster.helm(*command, *_image_values(), *_POD_TEMPLATES, *values)
        return command

    def upgrade(self, *values: str) -> Sequence[str]:
        command = ("upgrade", NAME, "charts/octavo", "-n", SYSTEM)
        self._cluster.helm(*command, *_image_values(), *_POD_TEMPLATES, *values)
        self._cluster.kubectl("rollout", "restart", "-n", SYSTEM, "deployment", "-l", SELECTOR)
        return command

    def until_up(self) -> None:
        status = ("rollout", "status", "deployment/octavo-operator", f"--timeout={UP_S}s")
        self._cluster.kubectl(*status, "-n", SYSTEM, within_s=UP_S + 10)

    def uninstall(self) -> None:
        self._cluster.helm("uninstall", NAME, "-n", SYSTEM, "--wait")

    def remove(self) -> None:
        """Remove the release, its namespace and the CRD, so that the next run starts with an empty cluster."""
        self._cluster.helm("uninstall", NAME, "-n", SYSTEM, "--ignore-not-found")
        self._cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")
        self._cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=60s")

    def scale(self, replicas: int) -> None:
        """Scale the operator and wait for its pods. Without operators, the chart registers no metrics API: no namespace
        can be deleted while a registered API does not answer."""
        self.upgrade("--set", f"operator.replicas={replicas}")
        self._cluster.until(
            "Pod", SYSTEM, lambda pods: sum(map(_runs, pods)) == replicas == len(pods),
            label=SELECTOR, within_s=UP_S, what=f"{replicas} operators",
        )  # fmt: skip

    def _clear_leftover_crd(self) -> None:
        """Delete a CRD that other tests have applied: helm would refuse to adopt it."""
        found = json.loads(
            self._cluster.kubectl("get", "crd", "-o", "json", "--field-selector", f"metadata.name={CRD}")
        )
        for crd in found["items"]:
            if crd["metadata"].get("annotations", {}).get("meta.helm.sh/release-name"):
                return
            self._cluster.until_gone(None, "InferenceService", within_s=UP_S)
            self._cluster.kubectl("delete", "crd", CRD, "--timeout=60s")


def _runs(pod: dict[str, object]) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses", [])  # type: ignore[attr-defined]
    return bool(statuses) and all(s["ready"] for s in statuses)


def _image_values() -> list[str]:
    """Values for images that `make images` has built under other names than the chart's defaults."""
    given = {"registry": os.environ.get("IMAGE_PREFIX"), "tag": os.environ.get("IMAGE_TAG")}
    return [part for name, value in given.items() if value for part in ("--set-string", f"images.{name}={value}")]
