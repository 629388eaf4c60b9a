"""Calls to all ranks: each rank does its part, and all of them keep it or none."""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.loop.loaded_adapters import LoadedAdapters
from octavo_engine.process.parallel_executor import ParallelExecutor
from octavo_engine.process.rank import answer
from octavo_engine.process.rank_messages import (
    AddAdapter,
    Answer,
    Call,
    Release,
    RemoveAdapter,
    Restore,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from octavo_engine.runner.adapters import PreparedAdapter
from octavo_engine.runner.lora_terms import tensors_of_bytes
from octavo_engine.sources.adapter import AdapterFiles, AdapterModule
from octavo_engine.sources.progress import Advance
from octavo_engine.sources.safetensors_header import SafeTensor
from octavo_engine.wire.errors import EngineDead, StartupError

MODULE = AdapterModule(
    name="layer",
    rank=1,
    scale=0.5,
    a=SafeTensor(name="a", dtype="BF16", shape=(1, 1), offset=64, num_bytes=2),
    b=SafeTensor(name="b", dtype="BF16", shape=(1, 1), offset=66, num_bytes=2),
)
FILES = AdapterFiles(folder=Path("/folder"), modules={"layer": MODULE})
TENSORS = {"a": torch.ones(1, 1, dtype=torch.bfloat16), "b": torch.full((1, 1), 2.0, dtype=torch.bfloat16)}
CALLS = [
    *(Release("kv_cache"), Release("weights"), Restore("weights"), Restore("kv_cache")),
    *(AddAdapter(FILES, {"a": bytearray(b"\x80?"), "b": bytearray(b"\0@")}, "hash"), RemoveAdapter("hash")),
]
PREPARED = PreparedAdapter("hash", {}, None, FILES, TENSORS)  # type: ignore[arg-type]


class Memory:
    """The memory of one rank. `lost`: the error of restoring it, and of adding an adapter."""

    def __init__(self, lost: Exception | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self.lost = lost
        self.tensors: dict[str, torch.Tensor] = {}

    def release(self, tag: str) -> None:
        self.calls.append(("release", tag))

    def restore(self, tag: str) -> None:
        self.calls.append(("restore", tag))
        if self.lost is not None:
            raise self.lost

    def prepare_adapter(self, location: str, advance: Advance) -> "Future[PreparedAdapter]":
        future: Future[PreparedAdapter] = Future()
        future.set_result(PREPARED)
        return future

    def add_adapter(self, prepared: PreparedAdapter) -> None:
        self.add_read_adapter(prepared.files, {}, prepared.hash)

    def add_read_adapter(self, files: AdapterFiles, tensors: Mapping[str, bytearray], adapter: str) -> None:
        self.calls.append(("load", f"{files.folder} {adapter}"))
        self.tensors = tensors_of_bytes(files, tensors) if tensors else {}
        if self.lost is not None:
            raise self.lost

    def remove_adapter(self, adapter: str) -> None:
        self.calls.append(("remove", adapter))


class Rank1:
    """`RankProcesses` of one rank, which answers when rank 0 waits for it."""

    def __init__(self, memory: Memory, *, has_ended: bool = False) -> None:
        self.memory, self.has_ended = memory, has_ended
        self.answers: list[Answer] = []

    def send(self, call: Any) -> None:
        self.answers.append(answer(self.memory, call))  # type: ignore[arg-type]

    def collect_answers(self, *, has_limit: bool = False) -> list[StartupError]:
        if self.has_ended:
            raise EngineDead("rank 1: its process was killed by signal 9.")
        answers, self.answers = self.answers, []
        return [StartupError(f"rank 1: {each.error}") for each in answers if each.error is not None]


def executor(memory: Memory, rank: Rank1) -> ParallelExecutor:
    return ParallelExecutor(memory, rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_calls_and_answers_survive_the_way(call: Call) -> None:
    assert decode_to_rank(encode(call)) == call
    assert decode_from_rank(encode(Answer("no file"))) == Answer("no file")


def test_all_ranks_release_and_restore() -> None:
    memory, other = Memory(), Memory()
    ranks = executor(memory, Rank1(other))
    ranks.release("kv_cache")
    ranks.restore("kv_cache")
    assert memory.calls == other.calls == [("release", "kv_cache"), ("restore", "kv_cache")]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("error", [StartupError("m.gguf: cannot be read"), MemoryError()], ids=["file", "memory"])
def test_memory_that_one_rank_cannot_restore_is_released_on_all(lost: int, error: Exception) -> None:
    memories = [Memory(error if rank == lost else None) for rank in (0, 1)]
    ranks = executor(memories[0], Rank1(memories[1]))
    with pytest.raises(type(error) if lost == 0 else StartupError) as caught:
        ranks.restore("weights")
    assert lost == 0 or str(caught.value) == f"rank 1: {str(error) or 'MemoryError'}"
    for memory in memories:
        assert memory.calls == [("restore", "weights"), ("release", "weights")]
    memories[lost].lost = None
    ranks.restore("weights")


def test_a_rank_that_ends_while_it_restores_ends_the_engine() -> None:
    memory = Memory()
    with pytest.raises(EngineDead, match=r"rank 1: .* killed"):
        executor(memory, Rank1(Memory(), has_ended=True)).restore("weights")
    assert memory.calls == [("restore", "weights")]


def test_all_ranks_add_and_remove_an_adapter() -> None:
    memory, other = Memory(), Memory()
    ranks = executor(memory, Rank1(other))
    ranks.add_adapter(PREPARED)
    ranks.remove_adapter("hash")
    ranks.add_adapter(PREPARED)
    assert memory.calls == other.calls == [("load", "/folder hash"), ("remove", "hash"), ("load", "/folder hash")]
    assert other.tensors == TENSORS


def test_an_adapter_that_rank_0_cannot_add_reaches_no_rank() -> None:
    other = Memory()
    with pytest.raises(StartupError, match="engine slept"):
        executor(Memory(StartupError("the engine slept")), Rank1(other)).add_adapter(PREPARED)
    assert other.calls == []


def test_an_adapter_that_another_rank_cannot_add_is_removed_from_all() -> None:
    memory, other = Memory(), Memory(StartupError("it has changed"))
    ranks = executor(memory, Rank1(other))
    with pytest.raises(StartupError, match=r"^rank 1: it has changed"):
        ranks.add_adapter(PREPARED)
    assert memory.calls == other.calls == [("load", "/folder hash"), ("remove", "hash")]
    other.lost = None
    ranks.add_adapter(PREPARED)


def test_a_rank_that_ends_while_it_adds_an_adapter_ends_the_engine() -> None:
    adapters = LoadedAdapters(executor(Memory(), Rank1(Memory(), has_ended=True)), time.monotonic, max_in_memory=1)
    with pytest.raises(EngineDead, match=r"rank 1: .* killed"):
        adapters.load("/folder")
