"""Ranks of one model as threads of this process, so that a test sees the results of each of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from octavo_engine.ops.group import Group, open_group
from octavo_engine.wire.errors import EngineDead

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=30)


def run_ranks(size: int, run: Callable[[Group], Result], timeout: timedelta = TIMEOUT) -> list[Result]:
    """Call `run` on a thread for each rank; return the results. Raises the first error that no other rank caused."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:

        def run_rank(rank: int) -> Result:
            torch.set_num_threads(1)
            return run(open_group(Path(folder) / "ranks", rank, size, timeout))

        started = [pool.submit(run_rank, rank) for rank in range(size)]
        errors = [error for each in started if (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, EngineDead)), errors[0])
        return [each.result() for each in started]
