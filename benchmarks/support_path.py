"""Importing this module adds the tests' support to `sys.path`, so that `octavo_testing` can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
