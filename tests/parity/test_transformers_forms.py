"""Every causal class of transformers: its logits are equal here, or the start refuses it by name."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARTS = 12


@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_every_form_is_equal_or_refused_by_architecture(part: int) -> None:
    command = [sys.executable, "tools/model_forms.py", "--part", f"{part}/{PARTS}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = [line.split("\t") for line in ran.stdout.splitlines()]
    assert len(rows) >= 10, ran.stderr
    assert ran.returncode == 0, ran.stdout
    for form, result, reason in rows:
        name = form.partition("/")[2]
        assert result in ("equal", "refused"), (form, result, reason)
        assert result != "refused" or (f"'{name}'" in reason and "not supported" in reason), (form, reason)
