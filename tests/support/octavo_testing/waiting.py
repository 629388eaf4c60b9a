"""A bounded wait for another process."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def eventually(
    holds: Callable[[], object], *, within_s: float = PATIENCE_S, describe: Callable[[], object] = str
) -> None:
    """Wait until `holds` returns true; after `within_s` fail with the text of `describe`."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {describe()}"
        time.sleep(0.05)
