"""How the threads of OpenMP wait for each other. Imports no torch: the runtime reads its settings when torch loads it.

By default libgomp's threads spin for milliseconds at each barrier. On a machine that has anything else to do (the API
process is enough on two cores) a spinning thread takes the CPU from the very thread that it waits for: a decode step
of SmolLM2 on two busy cores took 290 ms so, and 35 ms with short spinning; on idle cores both take 12 ms.
"""

import os

SPIN_COUNT = "1000"  # some microseconds: longer than the gap between two kernels of a step
_USERS_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def wait_politely() -> None:
    """Before torch is imported; later it has no effect. A user's own choice stands."""
    if not any(os.environ.get(name) for name in _USERS_OWN):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
