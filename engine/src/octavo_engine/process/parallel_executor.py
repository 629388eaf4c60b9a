"""Runs a model on several ranks: rank 0 in this process, and a process for each of the others.

Every rank gets every plan and computes its part of each layer; rank 0 samples. A rank that ends, also while the engine
is idle, ends the engine: `EngineDead` names the rank and the cause.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.process.rank_messages import AddAdapter, Release, RemoveAdapter, Restore, RunPlan
from octavo_engine.process.rank_processes import RankProcesses
from octavo_engine.process.remote_hosts import RemoteHosts
from octavo_engine.runner.adapters import PreparedAdapter
from octavo_engine.runner.executor import Executor, LocalExecutor, ReadAdapter
from octavo_engine.runner.load import load
from octavo_engine.runner.lora_terms import bytes_of_tensors
from octavo_engine.settings.config import EngineConfig, num_ranks
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.sources.progress import Advance
from octavo_engine.wire.errors import CALL_ERRORS, EngineDead, GroupBroken, StartupError
from octavo_engine.wire.plan import StepPlan, StepResult
from octavo_engine.wire.sleep import MemoryTag


def load_executor(config: EngineConfig) -> tuple[Executor, ReadyInfo]:
    """Load the model on all its ranks. Raises StartupError."""
    if num_ranks(config) == 1:
        return load(config)
    hosts = None if config.nnodes == 1 else RemoteHosts(config)
    ranks = RankProcesses(num_ranks(config), config.distributed_timeout_seconds, hosts)
    try:
        if hosts is not None:
            hosts.wait()
        local, ready = load(config, other_ranks=ranks)
    except GroupBroken as error:
        cause = ranks.find_cause(error)
        ranks.stop(str(cause))
        raise StartupError(str(cause)) from error
    except BaseException as error:
        ranks.stop(str(error) or type(error).__name__)
        raise
    if hosts is not None:
        hosts.announce_serving()
    return ParallelExecutor(local, ranks), ready


class ParallelExecutor:
    """`local`: runs rank 0's part of each plan; all ranks have its adapters."""

    def __init__(self, local: LocalExecutor, ranks: RankProcesses) -> None:
        self._local, self._ranks = local, ranks

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Run a plan on all ranks. Raises EngineDead with the cause if a rank is gone."""
        self._ranks.send(RunPlan(_without_grammars(plan)))
        try:
            future = self._local.submit(plan)
            future.result()  # no step is ahead of another one, and this may fail as well
        except GroupBroken as error:
            raise self._ranks.find_cause(error) from error
        return future

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        self._ranks.on_lost(call)

    @property
    def images(self) -> ProcessedImages | None:
        return self._local.images

    def prepare(self, grammar: str) -> "Future[object]":
        return self._local.prepare(grammar)

    def prepare_adapter(self, location: str, advance: Advance) -> "Future[ReadAdapter]":
        return self._local.prepare_adapter(location, advance)

    def add_adapter(self, prepared: ReadAdapter) -> None:
        """Add an adapter on all ranks, or on none. Rank 0 sends the files' contents to the other ranks, so that they
        need not wait for a download.

        Raises EngineDead if a rank ends.
        """
        assert isinstance(prepared, PreparedAdapter)
        self._local.add_adapter(prepared)
        self._ranks.send(AddAdapter(prepared.files, bytes_of_tensors(prepared.tensors), prepared.hash))
        if errors := self._ranks.collect_answers(has_limit=True):
            self.remove_adapter(prepared.hash)
            raise errors[0]

    def remove_adapter(self, adapter: str) -> None:
        """Remove an adapter from all ranks. Raises EngineDead if a rank ends or cannot remove it."""
        self._ranks.send(RemoveAdapter(adapter))
        self._local.remove_adapter(adapter)
        for error in self._ranks.collect_answers(has_limit=True):
            raise EngineDead(str(error))

    def release(self, tag: MemoryTag) -> None:
        """Release a part of the memory of all ranks. Raises EngineDead if a rank ends or cannot release it."""
        self._ranks.send(Release(tag))
        self._local.release(tag)
        for error in self._ranks.collect_answers():
            raise EngineDead(str(error))

    def restore(self, tag: MemoryTag) -> None:
        """Restore a part of the memory of all ranks, or of none: then the error of the first rank without it is raised.

        Raises EngineDead if a rank ends.
        """
        self._ranks.send(Restore(tag))
        errors: list[Exception] = []
        try:
            self._local.restore(tag)
        except CALL_ERRORS as error:
            errors.append(error)
        errors += self._ranks.collect_answers()
        if errors:
            self.release(tag)
            raise errors[0]

    def shutdown(self, reason: str | None = None) -> None:
        self._local.shutdown()
        self._ranks.stop(reason)


def _without_grammars(plan: StepPlan) -> StepPlan:
    """Return the plan for the other ranks, which sample nothing and compile no grammars."""
    if all(new.grammar is None for new in plan.new_seqs):
        return plan
    return replace(plan, new_seqs=[replace(new, grammar=None) for new in plan.new_seqs])
