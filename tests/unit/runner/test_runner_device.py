"""Threads, memory and KV defaults of the CPU device."""

from pathlib import Path

import pytest
import torch
from octavo_engine.config import EngineConfig
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.runner.cgroup import CgroupLimits
from octavo_engine.runner.cpu_threads import ThreadPlan, physical_cores, plan_threads
from octavo_engine.runner.device import CpuDevice, open_device
from octavo_engine.runner.memory import GIB, host_memory
from octavo_engine.wire.errors import StartupError

BIND = "OCTAVO_CPU_OMP_THREADS_BIND"
THREADS = {
    "all cores": ({}, None, CgroupLimits(), ThreadPlan(num_threads=4)),
    "quota": ({}, None, CgroupLimits(cpus=1.5), ThreadPlan(num_threads=2)),
    "less than one CPU": ({}, None, CgroupLimits(cpus=0.2), ThreadPlan(num_threads=1)),
    "the flag wins": ({"OMP_NUM_THREADS": "3"}, 7, CgroupLimits(cpus=1.0), ThreadPlan(num_threads=7)),
    "OMP_NUM_THREADS": ({"OMP_NUM_THREADS": "3"}, None, CgroupLimits(cpus=1.0), ThreadPlan(num_threads=3)),
    "bind": ({BIND: "0-1,3"}, None, CgroupLimits(), ThreadPlan(num_threads=3, cpus=frozenset({0, 1, 3}))),
    "bind by vLLM's name, two ranks": (
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


def test_a_missing_gpu_is_refused_with_a_code() -> None:
    with pytest.raises(StartupError, match="--device cuda") as raised:
        open_device("cuda")
    assert raised.value.code == "NoDevice"
