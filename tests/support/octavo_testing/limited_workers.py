"""Loaders for an engine core whose media workers have a second, or little memory, for an image.

So tests of images that are late or too large are short.
"""

from functools import partial

from octavo_engine.media.worker import MediaWorkers, WorkerStart
from octavo_engine.process.parallel_executor import load_executor
from octavo_engine.runner import model_loading
from octavo_engine.runner.executor import Executor
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo

HASTY_LOADER = "octavo_testing.limited_workers:load_hasty_workers"
SMALL_LOADER = "octavo_testing.limited_workers:load_small_workers"


def load_hasty_workers(config: EngineConfig) -> tuple[Executor, ReadyInfo]:
    model_loading.MediaWorkers = partial(MediaWorkers, timeout_s=1.0)  # type: ignore[assignment, misc]
    return load_executor(config)


def load_small_workers(config: EngineConfig) -> tuple[Executor, ReadyInfo]:
    model_loading.WorkerStart = partial(WorkerStart, memory_bytes=512 << 20)  # type: ignore[assignment, misc]
    return load_executor(config)
