"""Threads, memory and KV defaults of the CPU device."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.devices.cpu_threads import ThreadPlan, physical_cores, plan_threads
from octavo_engine.devices.device import CpuDevice, open_device
from octavo_engine.devices.memory import GIB, host_memory
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.errors import StartupError

BIND = "OCTAVO_CPU_OMP_THREADS_BIND"
THREADS = {
    "all cores": ({}, None, CgroupLimits(), ThreadPlan(num_threads=4)),
    "quota": ({}, None, CgroupLimits(cpus=1.5), ThreadPlan(num_threads=2)),
    "less than one CPU": ({}, None, CgroupLimits(cpus=0.2), ThreadPlan(num_threads=1)),
    "the flag wins": ({"OMP_NUM_THREADS": "3"}, 7, CgroupLimits(cpus=1.0), ThreadPlan(num_threads=7)),
    "OMP_NUM_THREADS": ({"OMP_NUM_THREADS": "3"}, None, CgroupLimits(cpus=1.0), ThreadPlan(num_threads=3)),
    "bind": ({BIND: "0-1,3"}, None, CgroupLimits(), ThreadPlan(num_threads=3, cpus=frozenset({0, 1, 3}))),
    "bind by vLLM's name, parts of ranks": (
        {"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"},
        None,
        CgroupLimits(),
        ThreadPlan(num_threads=2, cpus=frozenset({0, 1})),
    ),
    "nobind": ({BIND: "nobind"}, None, CgroupLimits(), ThreadPlan(num_threads=4)),
}


@pytest.mark.parametrize("case", THREADS)
def test_threads_follow_flags_affinity_and_quota(case: str, tmp_path: Path) -> None:
    env, wanted, limits, plan = THREADS[case]
    assert plan_threads(wanted, env=env, affinity={0, 1, 2, 3}, limits=limits, root=tmp_path) == plan


def test_each_rank_gets_its_part_of_a_binding() -> None:
    env = {BIND: "0-1|3|2"}

    def plan(wanted: int | None, rank: int) -> ThreadPlan:
        return plan_threads(wanted, env=env, affinity={0, 1, 2, 3}, limits=CgroupLimits(), rank=rank, num_ranks=2)

    assert plan(None, 0) == ThreadPlan(num_threads=2, cpus=frozenset({0, 1}))
    assert plan(None, 1) == ThreadPlan(num_threads=1, cpus=frozenset({3}))
    assert plan(4, 1) == ThreadPlan(num_threads=4, cpus=frozenset({3}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0-3", "need 3 lists of CPUs, separated by |, but there are 1: write one for each rank"),
        ("0|1", "need 3 lists of CPUs, separated by |, but there are 2"),
        ("0|1|", "this is not a list of CPUs"),
        ("0|1|2-4", r"CPUs [4] are not available; available CPUs: [0, 1, 2, 3]"),
    ],
)
def test_all_parts_of_a_binding_are_checked_by_rank_0(value: str, text: str) -> None:
    with pytest.raises(StartupError, match=re.escape(text)) as caught:
        plan_threads(None, env={BIND: value}, affinity={0, 1, 2, 3}, limits=CgroupLimits(), num_ranks=3)
    assert str(caught.value).startswith(f"{BIND}=")


@pytest.mark.parametrize("value", ["a-b", "3-1", "9", "0-"])
def test_a_bad_binding_is_refused_by_name(value: str) -> None:
    with pytest.raises(StartupError, match=rf"{BIND}={value}"):
        plan_threads(None, env={BIND: value}, affinity={0, 1}, limits=CgroupLimits())


def test_each_physical_core_gets_one_thread(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == {0, 1}
    assert physical_cores({2, 3}, tmp_path) == {2, 3}


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        (CgroupLimits(), (8 * GIB, 5 * GIB)),
        (CgroupLimits(memory_bytes=2 * GIB, memory_available_bytes=GIB), (2 * GIB, GIB)),
        (CgroupLimits(memory_bytes=64 * GIB, memory_available_bytes=60 * GIB), (8 * GIB, 5 * GIB)),
    ],
)
def test_memory_is_the_lesser_of_machine_and_container(
    tmp_path: Path, limits: CgroupLimits, want: tuple[int, int]
) -> None:
    (tmp_path / "proc").mkdir()
    kib = GIB // 1024
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * kib} kB\nMemFree: 1 kB\nMemAvailable: {5 * kib} kB\n")
    memory = host_memory(limits, tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == want


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({}, None),
        ({"OCTAVO_CPU_KVCACHE_SPACE": "1.5"}, 3 * GIB // 2),
        ({"VLLM_CPU_KVCACHE_SPACE": "40"}, 40 * GIB),
        ({"VLLM_CPU_KVCACHE_SPACE": "0"}, None),
        ({"OCTAVO_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_KVCACHE_SPACE": "40"}, 2 * GIB),
    ],
)
def test_variables_set_the_kv_space(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], want: int | None) -> None:
    for name in ("OCTAVO_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert CpuDevice().kv_space_bytes() == want


def test_a_kv_space_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "lots")
    with pytest.raises(StartupError, match="VLLM_CPU_KVCACHE_SPACE=lots"):
        CpuDevice().kv_space_bytes()


def test_the_cpu_device_has_every_member() -> None:
    device = open_device("auto")
    assert device.name == "cpu"
    assert device.host_blocks(3, 10).shape == (3, 10)
    assert device.memory().available_bytes > 0
    backend = device.attention_backend([LayerKVSpec(num_kv_heads=2, head_dim=16)], 16, torch.float32)
    assert backend.bytes_per_block() == 2 * 16 * 2 * 16 * 4
    device.synchronize()


def test_prepare_sets_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    CpuDevice().prepare(EngineConfig(num_threads=1))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize(("bind", "is_bound"), [("", True), ("auto", True), ("nobind", False)])
def test_a_rank_runs_on_the_cpus_of_its_node(monkeypatch: pytest.MonkeyPatch, bind: str, is_bound: bool) -> None:
    allowed = os.sched_getaffinity(0)
    asked: list[tuple[int, int, int]] = []

    def node_of_rank(rank: int, num_ranks: int, *, num_threads: int, affinity: set[int]) -> frozenset[int]:
        asked.append((rank, num_ranks, num_threads))
        return frozenset({min(affinity)})

    monkeypatch.setattr("octavo_engine.devices.device.node_of_rank", node_of_rank)
    monkeypatch.setenv(BIND, bind)
    config = EngineConfig(num_threads=torch.get_num_threads(), tensor_parallel_size=2)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(CpuDevice(rank=1).prepare, config).result()
        assert thread.submit(os.sched_getaffinity, 0).result() == ({min(allowed)} if is_bound else allowed)
    assert asked == ([(1, 2, config.num_threads)] if is_bound else [])


def test_a_missing_gpu_is_refused_with_a_code() -> None:
    with pytest.raises(StartupError, match="--device cuda") as raised:
        open_device("cuda")
    assert raised.value.code == "NoDevice"
