"""`EngineMemory`: gives the weights and the KV cache back to the system while an engine sleeps, and restores them."""

import ctypes
import gc
import sys
from collections.abc import Callable

from torch import Tensor

from octavo_engine.devices.device import Device
from octavo_engine.devices.step_inputs import RunnableModel
from octavo_engine.ops.attention import AttentionBackend
from octavo_engine.runner.drafter import Drafter
from octavo_engine.runner.runner import Runner
from octavo_engine.wire.sleep import MemoryTag


class EngineMemory:
    """The memory of one runner. `load_model` raises StartupError; `make_host` allocates the runner's `host`."""

    def __init__(
        self,
        runner: Runner,
        backend: AttentionBackend,
        device: Device,
        *,
        num_blocks: int,
        load_model: Callable[[], RunnableModel],
        make_host: Callable[[], Tensor | None],
        drafter: Drafter | None = None,
    ) -> None:
        self._runner = runner
        self._backend = backend
        self.device = device
        self._num_blocks = num_blocks
        self._load_model = load_model
        self._make_host = make_host
        self._drafter = drafter
        self._released: set[MemoryTag] = set()

    def release(self, tag: MemoryTag) -> None:
        """Free the memory. No plan may run until `restore`."""
        self._released.add(tag)
        if tag == "weights":
            self._runner.replace_model(None)
            if self._drafter is not None:
                self._drafter.model.replace(None)
        else:
            self._runner.release_rows()
            self._runner.model.renew_graphs()
            self._backend.release()
            self._runner.host = None
            if self._drafter is not None:
                self._drafter.model.renew_graphs()
                self._drafter.cache.release()
        return_freed_memory()
        self.device.release_unused_memory()

    def restore(self, tag: MemoryTag) -> None:
        """Load the weights again, or allocate an empty KV cache. After an error, this memory is released again.

        Once all memory is restored, the graphs of steps are captured, so that no request waits for a capture.
        """
        try:
            self._restore(tag)
            if not self._released - {tag}:
                self._runner.capture_graphs()
        except Exception:
            self.release(tag)  # the parts restored so far, if a later one fails
            raise
        self._released.discard(tag)

    def _restore(self, tag: MemoryTag) -> None:
        if tag == "weights":
            model = self._load_model()
            if self._drafter is not None:
                self._drafter.reload_model()
            self._runner.replace_model(model)
        else:
            self._backend.allocate(self._num_blocks)
            self._runner.host = self._make_host()
            if self._drafter is not None:
                self._drafter.cache.allocate()


def return_freed_memory() -> None:
    """Free unreachable objects, also frozen ones, and return the allocator's free memory to the system."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(ctypes.c_size_t(0))
