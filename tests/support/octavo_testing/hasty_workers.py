"""A loader for an engine core whose media workers have a second for an image, so that tests of late ones are short."""

from functools import partial

from octavo_engine.media.worker import MediaWorkers
from octavo_engine.process.parallel_executor import load_executor
from octavo_engine.runner import model_loading
from octavo_engine.runner.executor import Executor
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo

LOADER = "octavo_testing.hasty_workers:load_hastily"


def load_hastily(config: EngineConfig) -> tuple[Executor, ReadyInfo]:
    model_loading.MediaWorkers = partial(MediaWorkers, timeout_s=1.0)  # type: ignore[assignment, misc]
    return load_executor(config)
