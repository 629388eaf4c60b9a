"""Imported for what it does: the tests' support (`octavo_testing`) can be imported after it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
