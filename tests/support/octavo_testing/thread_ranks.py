"""The ranks of an engine as threads of its process, each with a device that stands for a GPU."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import HostMemory
from octavo_engine.devices.step_inputs import RunnableModel, StepGraphs, StepLimits
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages, open_ranks
from octavo_engine.process import parallel_executor
from octavo_engine.process.rank_messages import LoadPart, RunPlan, decode_to_rank, encode
from octavo_engine.runner import load
from octavo_engine.runner.rank_plans import RankPlans
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import StepPlan

from octavo_testing.ranks import make_stores


class GpuStandIn(CpuDevice):
    """A device that engines take for a GPU, except that its tensors are the CPU's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name, self.rank = "cuda", rank
        self.packs_weights, self.compiles_late = False, True
        self.group_gpu = torch.device("cpu")

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> StepGraphs | None:  # type: ignore[override]
        gpu = CudaDevice(self.rank)
        gpu.num_ranks = 2
        return gpu.step_graphs(model, limits)


class ThreadRanks:
    """Takes the place of `RankProcesses`."""

    def __init__(self, size: int, timeout_s: int, hosts: None) -> None:
        self._size, self._stores, self._pool = size, make_stores(size), ThreadPoolExecutor(size - 1)
        self._timeout = timedelta(seconds=timeout_s)
        self._plans = [queue.SimpleQueue[StepPlan | None]() for _ in range(size)]
        self._ready = queue.SimpleQueue[int]()
        self.ended: list[Future[None]] = []

    def launch(self, config: EngineConfig, files: ModelFiles, own: HostMemory) -> list[HostMemory]:
        return [own]

    def start(self, files: ModelFiles, plans: RankPlans, gpu: torch.device | None) -> tuple[Group, Stages]:
        def run(rank: int) -> None:
            part = LoadPart(
                rank=rank,
                config=plans.config,
                files=files,
                host=plans.hosts[rank],
                num_blocks=plans.ranks[rank].kv.num_blocks,
                num_host_blocks=plans.ranks[rank].kv.num_host_blocks,
                num_layers=plans.num_layers,
                address="127.0.0.1",
            )
            executor, ready = load.load(part.config, part=part, store=self._stores[rank])
            self._ready.put(ready.weights_bytes)
            while (plan := self._plans[rank].get()) is not None:
                executor.submit(plan).result()

        self.ended = [self._pool.submit(run, rank) for rank in range(1, self._size)]
        return open_ranks(self._stores[0], 0, self._size, plans.num_layers, self._timeout, gpu=gpu)

    def check(self) -> None:
        """Do nothing: a rank that fails is an error of `stop`."""

    def wait_ready(self) -> int:
        return sum(self._ready.get() for _ in self.ended)

    def run(self, plans: list[StepPlan]) -> None:
        for plan in plans:
            self.send(RunPlan(plan))

    def send(self, message: RunPlan) -> None:
        """Send a plan as a process gets it."""
        sent = decode_to_rank(encode(message))
        assert isinstance(sent, RunPlan)
        for plans in self._plans[1:]:
            plans.put(sent.plan)

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Do nothing: threads do not end by themselves."""

    def find_cause(self, error: EngineDead) -> EngineDead:
        return error

    def stop(self, reason: str | None = None) -> None:
        """End the threads. Raises the error of a rank that has failed."""
        for plans in self._plans:
            plans.put(None)
        for each in self.ended:
            each.result()
        self._pool.shutdown()


@contextmanager
def ranks_on_gpu_stand_ins() -> Iterator[None]:
    """Let engines that start meanwhile use such ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_executor, "RankProcesses", ThreadRanks)
        patch.setattr(load, "open_device", lambda kind, rank=0: GpuStandIn(rank))
        yield
