"""`octavo fetch` as a process whose environment has only the variables that a test gives, as in a pod."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 240
FETCH = (sys.executable, "-P", "-m", "octavo_server.cli.main", "fetch")
_KEPT = ("PATH", "PYTHONPATH", "LANG", "VIRTUAL_ENV")


def fetch_environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), **more}


def start_fetch(*arguments: str, env: Mapping[str, str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([*FETCH, *arguments], stdout=pipe, stderr=pipe, text=True, env=dict(env))


def run_fetch(*arguments: str, env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FETCH, *arguments], capture_output=True, text=True, env=dict(env), timeout=TIMEOUT_S, check=False
    )
