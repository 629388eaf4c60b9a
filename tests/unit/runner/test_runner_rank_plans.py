"""Ranks divide threads and memory, and have equal numbers of blocks."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices import device
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MIB, HostMemory, MemoryInfo
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.rank_plans import divide_threads, plan_ranks
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import make_tiny


class Host(CpuDevice):
    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        host = MemoryInfo(total_bytes=self.total_bytes, available_bytes=self.total_bytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "host_memory", lambda limits, num_engines: host)
            return super().memory(num_ranks)


class Float32Host(Host):
    def default_dtype(self, model: Any) -> torch.dtype:
        return torch.float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = make_tiny("llama", tmp_path_factory.mktemp("models"))
    return folder, load_model_config(resolve_model(str(folder)))


def settings(size: int, **fields: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=size, dtype="float32", **fields)


def test_threads_are_divided() -> None:
    assert divide_threads(settings(2, num_threads=7), CpuDevice()).num_threads == 3
    assert divide_threads(settings(1), CpuDevice()) == settings(1)


def test_threads_of_a_binding_are_those_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-4")
    assert divide_threads(settings(2), CpuDevice()).num_threads is None
    assert divide_threads(settings(2, num_threads=4), CpuDevice()).num_threads == 2
    with pytest.raises(StartupError, match="3 ranks need 3 lists of CPUs"):
        divide_threads(settings(3), CpuDevice())


def test_fewer_threads_than_ranks_are_refused() -> None:
    with pytest.raises(StartupError, match=r"--tensor-parallel-size 4 needs .* but there are 3 .*use at most 3"):
        divide_threads(settings(4, num_threads=3), CpuDevice())


def test_ranks_of_several_hosts_need_a_thread_on_each() -> None:
    with pytest.raises(StartupError, match=r"size 4 needs .*, 2 on each host, but there are 1 .*use at most 2\."):
        divide_threads(settings(4, num_threads=1, nnodes=2), CpuDevice())


def test_each_rank_gets_its_part_of_the_memory(model: tuple[Path, ModelConfig]) -> None:
    one = plan_ranks(settings(1), Host(16 * GIB), model[1])
    two = plan_ranks(settings(2), Host(16 * GIB), model[1])
    assert two.ranks[0].memory.total_bytes == 8 * GIB
    (whole,), halves = one.ranks, two.ranks
    assert [half.model.bytes_per_block for half in halves] == [whole.model.bytes_per_block // 2] * 2
    assert max(half.model.weights_bytes for half in halves) < whole.model.weights_bytes
    assert len({half.kv.num_blocks for half in halves}) == 1
    assert sum(half.kv.kv_bytes for half in halves) <= 8 * GIB
    assert (two.config.max_model_len, two.config.dtype) == (whole.max_model_len, "float32")


def test_uneven_ranks_have_the_blocks_of_the_largest(model: tuple[Path, ModelConfig]) -> None:
    config = replace(model[1], num_heads=6, num_kv_heads=3)
    plans = plan_ranks(settings(2, kv_cache_memory_bytes=MIB), Host(16 * GIB), config).ranks
    sizes = [plan.model.bytes_per_block for plan in plans]
    assert sizes[1] == 2 * sizes[0]
    assert [plan.kv.num_blocks for plan in plans] == [MIB // sizes[1]] * 2


def test_ranks_that_copy_kv_heads_have_the_blocks_of_a_whole_head(model: tuple[Path, ModelConfig]) -> None:
    """Each of the two KV heads is on two of four ranks."""
    two, four = (plan_ranks(settings(size, kv_cache_memory_bytes=MIB), Host(16 * GIB), model[1]) for size in (2, 4))
    assert len({(each.model.bytes_per_block, each.kv.num_blocks) for each in (*two.ranks, *four.ranks)}) == 1
    assert sum(each.kv.kv_bytes for each in four.ranks) == 2 * sum(each.kv.kv_bytes for each in two.ranks)


@pytest.mark.parametrize("max_model_len", [None, 64])
def test_rank_0_alone_has_the_draft_model(model: tuple[Path, ModelConfig], max_model_len: int | None) -> None:
    draft = Checkpoint(files=resolve_model(str(model[0])), config=model[1], stored={})
    config = settings(2, kv_cache_memory_bytes=MIB, max_model_len=max_model_len)
    plain, drafting = (plan_ranks(config, Host(16 * GIB), model[1], draft=each).ranks for each in (None, draft))
    (whole,) = plan_ranks(settings(1), Host(16 * GIB), model[1]).ranks
    added = drafting[0].model.weights_bytes - plain[0].model.weights_bytes
    assert max_model_len is not None or added == whole.model.weights_bytes
    assert drafting[1].model == plain[1].model
    per_block = plain[0].model.bytes_per_block + whole.model.bytes_per_block
    assert [plan.model.bytes_per_block for plan in drafting] == [per_block, plain[1].model.bytes_per_block]
    assert [plan.kv.num_blocks for plan in drafting] == [MIB // per_block] * 2
    assert {plan.max_model_len for plan in drafting} == {max_model_len or whole.max_model_len}


def test_a_length_that_rank_0_cannot_hold_with_its_draft_model_is_shortened(model: tuple[Path, ModelConfig]) -> None:
    draft = Checkpoint(files=resolve_model(str(model[0])), config=model[1], stored={})
    config = settings(2, kv_cache_memory_bytes=96 << 10)
    plain, drafting = (plan_ranks(config, Host(16 * GIB), model[1], draft=each) for each in (None, draft))
    assert drafting.config.max_model_len is not None
    assert plain.config.max_model_len is not None
    assert drafting.config.max_model_len < plain.config.max_model_len


def test_the_length_of_all_hosts_is_logged_once(
    model: tuple[Path, ModelConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """The second host has less memory, and so it limits the length."""
    hosts = [host("a", num_gpu_blocks_override=4), host("b", num_gpu_blocks_override=3)]
    with caplog.at_level(logging.INFO, logger="octavo_engine"):
        assert plan_ranks(settings(2, nnodes=2), Host(16 * GIB), model[1], hosts=hosts).config.max_model_len == 48
    (line,) = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert line.startswith("max_model_len auto: 48 of the model's 128 tokens")


def test_a_rank_that_does_not_fit_is_named(model: tuple[Path, ModelConfig]) -> None:
    with pytest.raises(StartupError, match=r"rank 1 of 2, with its part of the memory: .*--max-model-len") as caught:
        plan_ranks(settings(2, num_gpu_blocks_override=3, max_model_len=100), Host(16 * GIB), model[1])
    assert caught.value.code == "OutOfMemory"


def host(name: str, total_bytes: int = 16 * GIB, free_bytes: int = 8 * GIB, **fields: Any) -> HostMemory:
    memory = MemoryInfo(total_bytes=total_bytes, available_bytes=min(free_bytes, total_bytes))
    return HostMemory(name=name, memory=memory, **fields)


@pytest.mark.parametrize(
    "less",
    [
        {"free_bytes": GIB},
        {"kv_cache_memory_bytes": MIB},
        {"num_gpu_blocks_override": 40},
        {"gpu_memory_utilization": 0.1},
    ],
    ids=lambda less: next(iter(less)),
)
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=str)
def test_the_host_with_the_fewest_blocks_decides(
    model: tuple[Path, ModelConfig], sizes: tuple[int, int], less: dict[str, Any]
) -> None:
    """Its limits count for its ranks only, and the first host has the same number of blocks, but not of bytes."""
    config = settings(sizes[0], pipeline_parallel_size=sizes[1], nnodes=2, max_model_len=96, num_gpu_blocks_override=99)
    device, hosts = Host(16 * GIB), [host("the first host", kv_cache_memory_bytes=GIB), host("host 1", **less)]
    plans = plan_ranks(config, device, model[1], hosts=hosts)
    (num_blocks,) = {each.kv.num_blocks for each in plans.ranks}
    alone = plan_ranks(config, device, model[1], hosts=[hosts[1]] * 2)
    assert (
        num_blocks
        == alone.ranks[-1].kv.num_blocks
        < plan_ranks(config, device, model[1], hosts=[hosts[0]] * 2).ranks[0].kv.num_blocks
    )
    assert plans.hosts == [hosts[rank * 2 // len(plans.ranks)] for rank in range(len(plans.ranks))]
    assert all(each.kv.kv_bytes == num_blocks * each.model.bytes_per_block for each in plans.ranks)


@pytest.mark.parametrize("least", [0, 1])
def test_the_host_with_the_shortest_length_decides(model: tuple[Path, ModelConfig], least: int) -> None:
    hosts = [host("the first host"), host("host 1 (10.0.0.2)")]
    hosts[least] = replace(hosts[least], kv_cache_memory_bytes=24 << 10)
    plans = plan_ranks(settings(2, nnodes=2), Host(16 * GIB), model[1], hosts=hosts)
    length = plans.config.max_model_len
    assert length is not None
    assert length < plan_ranks(settings(2, nnodes=2), Host(16 * GIB), model[1]).ranks[0].max_model_len
    assert {each.max_model_len for each in plans.ranks} == {length}


def test_a_rank_that_does_not_fit_is_named_with_its_host_and_the_values(model: tuple[Path, ModelConfig]) -> None:
    hosts = [host("the first host"), host("host 1 (10.0.0.2)", free_bytes=MIB // 10)]
    with pytest.raises(StartupError) as caught:
        plan_ranks(settings(2, nnodes=2, max_model_len=100), Host(16 * GIB), model[1], hosts=hosts)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 on host 1 (10.0.0.2), with its part of the memory: ")
    assert "only 0.1 MiB of 16.00 GiB of memory are available" in text
    assert "end other programs, or use a smaller model" in text


def test_the_least_memory_limit_of_all_hosts_decides_the_type(model: tuple[Path, ModelConfig]) -> None:
    config = replace(settings(2, nnodes=2), dtype="auto")
    more, less = 16 * GIB, 385 * MIB
    hosts = [host(str(total), total_bytes=total, kv_cache_memory_bytes=MIB) for total in (more, less)]
    assert plan_ranks(config, Float32Host(16 * GIB), model[1], hosts=hosts).config.dtype == "bfloat16"
    assert plan_ranks(config, Float32Host(16 * GIB), model[1], hosts=hosts[:1] * 2).config.dtype == "float32"


def test_an_error_of_the_model_names_no_rank(model: tuple[Path, ModelConfig]) -> None:
    with pytest.raises(StartupError, match=r"^--tensor-parallel-size 3 cannot divide"):
        plan_ranks(settings(3), Host(16 * GIB), model[1])
