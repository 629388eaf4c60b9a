"""Selects the cluster of the suite: `E2E_KUBECONFIG`, else kind if docker runs, else the local one (../shared/k8s).

The suite never uses the cluster of the user's own `KUBECONFIG`. It stops a cluster that it has started.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo_testing.cluster import LOCAL

ROOT = Path(__file__).parents[3]
KIND_CLUSTER = "octavo-e2e"
NUM_FAKE_GPUS = 2
START_S = 600
MISSING = (
    "no cluster for e2e tests: set E2E_KUBECONFIG (and E2E_INGRESS, the URL of its ingress controller), "
    "or install docker, kind, kubectl and helm, or put the local cluster's tools at ../shared/k8s and be root"
)
#: URL of the ingress controller on kind and on the local cluster.
INGRESS = "http://127.0.0.1:30080"


class NoCluster(Exception):
    """No cluster is available; the message names the missing parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    name: str
    env: Mapping[str, str]  # added to the environment of every command
    ingress: str = INGRESS
    tools: Path | None = None  # of the local cluster: scripts that kill and restart its components
    audit_log: Path | None = None
    reaches_services: bool = False  # whether cluster IPs are reachable from here
    stop: tuple[str, ...] = field(default=())  # command that stops a started cluster

    def run(
        self, *command: str, stdin: str | None = None, check: bool = True, within_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command. Raises AssertionError with its output if it fails."""
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            cwd=ROOT,
            env=os.environ | self.env,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done


def start() -> Provider:
    """Start the first available provider."""
    if given := os.environ.get("E2E_KUBECONFIG"):
        return Provider(
            name="E2E_KUBECONFIG",
            env={"KUBECONFIG": given},
            ingress=os.environ.get("E2E_INGRESS", INGRESS),
        )
    if _answers("docker", "info") and all(map(shutil.which, ("kind", "kubectl", "helm"))):
        return _kind()
    if (LOCAL / "up").exists() and os.geteuid() == 0:
        return _local()
    raise NoCluster(MISSING)


def _answers(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def _local() -> Provider:
    was_up = _answers("curl", "-sk", "-m", "2", "https://127.0.0.1:6443/readyz")
    Provider(name="", env={}).run(
        str(LOCAL / "up"), "--audit", "--lws", "--fake-gpus", str(NUM_FAKE_GPUS), within_s=START_S
    )
    shell = Provider(name="", env={}).run("bash", "-c", f'eval "$({LOCAL}/env)" && echo "$KUBECONFIG" && echo "$PATH"')
    kubeconfig, path = shell.stdout.splitlines()
    return Provider(
        name="local",
        env={"KUBECONFIG": kubeconfig, "PATH": path},
        tools=LOCAL,
        audit_log=Path(kubeconfig).parents[1] / "log" / "audit.log",
        reaches_services=True,
        stop=() if was_up else (str(LOCAL / "down"),),
    )


def _kind() -> Provider:
    """Start kind with the same ingress controller and address as the local cluster."""
    folder = ROOT / "results" / "e2e"
    folder.mkdir(parents=True, exist_ok=True)
    kind = Provider(name="kind", env={"KUBECONFIG": str(folder / "kubeconfig"), "KIND_CLUSTER": KIND_CLUSTER})
    was_up = KIND_CLUSTER in kind.run("kind", "get", "clusters").stdout.split()
    if was_up:
        kind.run("kind", "export", "kubeconfig", "--name", KIND_CLUSTER)
    else:
        config = ROOT / "e2e" / "kind.yaml"
        kind.run("kind", "create", "cluster", "--name", KIND_CLUSTER, f"--config={config}", within_s=START_S)
    values = ("service.type=NodePort", "ports.web.nodePort=30080")
    settings = [part for value in values for part in ("--set", value)]
    repository = ("--repo", "https://traefik.github.io/charts")
    kind.run("helm", "upgrade", "--install", "traefik", "traefik", *repository, "-n", "traefik", "--create-namespace",
             "--wait", *settings, within_s=START_S)  # fmt: skip
    amount = f'{{"nvidia.com/gpu": "{NUM_FAKE_GPUS}"}}'
    patch = f'{{"status": {{"capacity": {amount}, "allocatable": {amount}}}}}'
    node = f"{KIND_CLUSTER}-control-plane"
    kind.run("kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
    stop = () if was_up else ("kind", "delete", "cluster", "--name", KIND_CLUSTER)
    return Provider(name="kind", env=kind.env, stop=stop)
