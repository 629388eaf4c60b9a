"""The bar "Loading weights", by bytes, on stderr. The loader itself only calls a function with two numbers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from octavo_engine.weights.loader import Progress


@contextmanager
def loading_bar(*, always: bool = False) -> Iterator[Progress]:
    """Gives what `iter_weights(progress=...)` wants. Shown on a terminal, or `always` (a server's log)."""
    hidden = not (always or sys.stderr.isatty())
    with tqdm(desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=hidden) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
