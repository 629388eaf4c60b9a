"""`octavo-operator` as a process, started as in its image, for the cluster of a kubeconfig."""

import os
import sys
from pathlib import Path

from octavo_testing.component import Component
from octavo_testing.serve_command import free_port


class OperatorProcess(Component):
    """An operator that can be started again after `kill` or `stop`. Flags are the command's, with `_` for `-`."""

    def __init__(self, folder: Path, kubeconfig: Path, *, namespaces: tuple[str, ...] = (), **flags: object) -> None:
        self.probe_url = f"http://127.0.0.1:{free_port()}/healthz"
        key = folder / "operator.key"
        key.write_text("the key of the tests")
        given = {
            "engine_image": "octavo.invalid/engine:1",
            "router_image": "octavo.invalid/router:1",
            "image_pull_policy": "Never",
            "log_format": "text",
            "liveness": self.probe_url,
            **({} if "key_secret" in flags else {"key_file": key}),
            **flags,
        }
        options = [_option(name.replace("_", "-"), value) for name, value in given.items()]
        options += [f"--namespace={namespace}" for namespace in namespaces]
        super().__init__(
            f"operator {given.get('identity', '')}".strip(),
            [sys.executable, "-m", "octavo_operator.main", *options],
            folder / f"operator{given.get('identity', '')}.log",
            os.environ | {"KUBECONFIG": str(kubeconfig)},
        )


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"
