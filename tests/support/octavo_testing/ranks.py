"""Ranks of one model as threads of this process, so that a test sees the results of each of them."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.message_store import MessageStore
from octavo_engine.ops.rank_group import Group, open_group
from octavo_engine.ops.stages import Stages, open_ranks
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.weights.loader import iter_weights
from octavo_engine.wire.errors import EngineDead

from octavo_testing.tiny_models import LENGTH

Result = TypeVar("Result")
#: Also the time in which all ranks must have built their models, one after another, on however slow a machine.
TIMEOUT = timedelta(minutes=5)
#: While transformers builds a model, it changes torch's default dtype, which all threads share.
_BUILDING = threading.Lock()


def make_stores(size: int, timeout: timedelta = TIMEOUT) -> list[MessageStore]:
    """Make the store of each rank, for threads of this process."""
    inboxes = [queue.SimpleQueue[tuple[str, bytes]]() for _ in range(size)]

    def make(rank: int) -> MessageStore:
        def send(key: str, value: bytes) -> None:
            for inbox in inboxes[:rank] + inboxes[rank + 1 :]:
                inbox.put((key, value))

        def receive(timeout_s: float) -> tuple[str, bytes]:
            try:
                return inboxes[rank].get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError("another rank is late") from None

        return MessageStore(send, receive, timeout)

    return [make(rank) for rank in range(size)]


def run_ranks(
    size: int, run: Callable[[Group], Result], timeout: timedelta = TIMEOUT, *, gpu: torch.device | None = None
) -> list[Result]:
    """Call `run` on a thread for each rank; return the results. Raises the first error that no other rank caused."""
    stores = make_stores(size, timeout)
    return _run_on_threads(size, lambda rank: run(open_group(stores[rank], rank, size, timeout, timeout, gpu=gpu)))


def _run_on_threads(size: int, run: Callable[[int], Result]) -> list[Result]:
    def run_rank(rank: int) -> Result:
        torch.set_num_threads(1)
        return run(rank)

    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(run_rank, rank) for rank in range(size)]
        errors = [error for each in started if (error := each.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, EngineDead)), errors[0])
        return [each.result() for each in started]


def run_stages(num_layers: Sequence[int], ranks_per_stage: int, run: Callable[[Group, Stages], Result]) -> list[Result]:
    """Call `run` on a thread for each rank of stages with these numbers of layers; return the results."""
    size = len(num_layers) * ranks_per_stage
    stores = make_stores(size)
    return _run_on_threads(
        size, lambda rank: run(*open_ranks(stores[rank], rank, ranks_per_stage, num_layers, TIMEOUT, TIMEOUT))
    )


def load_part(
    files: ModelFiles, group: Group, *, stages: Stages | None = None, max_model_len: int = LENGTH, **build: Any
) -> Model:
    """Load the part of a tiny model that one rank computes, in fp32 unless `build` has another type."""
    build = {"dtype": torch.float32, "max_model_len": max_model_len} | build
    with _BUILDING:
        model = build_model(load_model_config(files), device="cpu", group=group, stages=stages, **build)
    model.load_weights(iter_weights(files, skipped=model.modules_elsewhere))
    model.finish_loading()
    return model
