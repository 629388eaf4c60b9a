"""Which Kubernetes the cluster tests talk to: the one that `E2E_KUBECONFIG` names, else the one of this machine.

Nothing is started here, and no cluster is used that the user's own `KUBECONFIG` happens to point at.
"""

import os
import subprocess
from pathlib import Path

LOCAL = Path(__file__).parents[4] / "shared" / "k8s"
MISSING = "no cluster: set E2E_KUBECONFIG to one that tests may write to, or start the local one (../shared/k8s/up)"


def kubeconfig() -> Path | None:
    """None where there is no cluster."""
    if given := os.environ.get("E2E_KUBECONFIG"):
        return Path(given)
    path = _shell_variable("KUBECONFIG")
    return Path(path) if path and Path(path).exists() else None


def local_binaries() -> str | None:
    """The folder of the local cluster's programs, which is there once it was up."""
    return _shell_variable("PATH").split(":")[0] or None


def _shell_variable(name: str) -> str:
    """What a shell is to set for the local cluster."""
    if not (LOCAL / "env").exists():
        return ""
    printed = subprocess.run([LOCAL / "env"], capture_output=True, text=True, check=False, timeout=30)
    words = [word.removeprefix(f"{name}=") for word in printed.stdout.split() if word.startswith(f"{name}=")]
    return words[0] if words else ""
