"""Short spinning is set before torch loads the OpenMP runtime, unless the user has chosen."""

import os
import subprocess
import sys

import pytest
from octavo_engine.runner.openmp import SPIN_COUNT, wait_politely

SCRIPT = """
import os, sys
from octavo_engine.engine_start import find_loader
assert "torch" not in sys.modules
find_loader("octavo_engine.runner.load:load_executor")
assert "torch" in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_users_own_choice_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(name, "5")
    wait_politely()
    assert os.environ.get("GOMP_SPINCOUNT") == ("5" if name == "GOMP_SPINCOUNT" else None)


def test_set_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60, env={"PATH": "/bin"}
    )
    assert done.stdout.strip() == SPIN_COUNT
