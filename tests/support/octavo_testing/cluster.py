"""The Kubernetes cluster of the cluster tests: the one in `E2E_KUBECONFIG`, else the local cluster of this machine.

This module starts nothing, and it ignores the user's own `KUBECONFIG`.
"""

import os
import subprocess
from pathlib import Path

LOCAL = Path(__file__).parents[4] / "shared" / "k8s"
MISSING = "no cluster: set E2E_KUBECONFIG to one that tests may write to, or start the local one (../shared/k8s/up)"


def kubeconfig() -> Path | None:
    """Return the path of the kubeconfig, or None where there is no cluster."""
    if given := os.environ.get("E2E_KUBECONFIG"):
        return Path(given)
    path = _shell_variable("KUBECONFIG")
    return Path(path) if path and Path(path).exists() else None


def local_binaries() -> str | None:
    """Return the folder of the local cluster's programs, which exists once that cluster was started."""
    return _shell_variable("PATH").split(":")[0] or None


def _shell_variable(name: str) -> str:
    """Return a variable that a shell sets to use the local cluster; empty if there is none."""
    if not (LOCAL / "env").exists():
        return ""
    printed = subprocess.run([LOCAL / "env"], capture_output=True, text=True, check=False, timeout=240)
    words = [word.removeprefix(f"{name}=") for word in printed.stdout.split() if word.startswith(f"{name}=")]
    return words[0] if words else ""
