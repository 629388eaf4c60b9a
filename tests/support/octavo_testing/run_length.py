"""The length of random tests and soak tests: `LONG=1 make test-slow` runs the long form."""

import os

LONG = bool(os.environ.get("LONG"))
