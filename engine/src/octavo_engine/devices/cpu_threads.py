"""Chooses the number of compute threads and their CPUs from affinity, cgroup quota and environment variables.

`OCTAVO_CPU_OMP_THREADS_BIND` or `VLLM_CPU_OMP_THREADS_BIND` is "nobind", "auto" or a list of CPUs: "0-3,8", or with
several ranks "0-3|4-7", a list per rank. By default, there is one thread per physical core within affinity and quota.

If possible, each rank of a model is bound to a NUMA node of its own. Linux places a page on the node of the thread that
first writes it, so the rank's memory is on its node. Otherwise, memory is interleaved over the nodes of the compute
threads: one loading thread would place all weights on its own node, and threads of other nodes would read them over the
link between sockets, whereas interleaved memory uses the memory channels of all nodes in each step. Threads inherit the
policy from the thread that starts them. `root` is "/" in production; tests pass a tree of files.
"""

import ctypes
import logging
import math
import os
import platform
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.wire.errors import StartupError

BIND_VARIABLES = ("OCTAVO_CPU_OMP_THREADS_BIND", "VLLM_CPU_OMP_THREADS_BIND")
_LOGGER = logging.getLogger(__name__)
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
#: For each machine type, the system call numbers of get_mempolicy and set_mempolicy, which libc does not wrap.
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_MOST_NODES = 1024  # Linux's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    num_threads: int
    cpus: frozenset[int] | None = None  # the CPUs to bind to; None: keep the affinity


def plan_threads(
    wanted: int | None,
    *,
    env: Mapping[str, str],
    affinity: set[int],
    limits: CgroupLimits,
    root: Path = Path("/"),
    rank: int = 0,
    num_ranks: int = 1,
) -> ThreadPlan:
    """Plan the compute threads. `wanted`: --num-threads. Raises StartupError for an impossible binding to CPUs.

    `rank`: the rank whose CPUs are planned, if a variable binds CPUs; the CPUs of all ranks are checked.
    """
    name, value = bind_setting(env)
    if value not in ("auto", "nobind", "all"):
        cpus = _parts(name, value, num_ranks, affinity)[rank]
        return ThreadPlan(num_threads=wanted or len(cpus), cpus=cpus)
    if wanted is None and env.get("OMP_NUM_THREADS", "").isdigit():
        wanted = int(env["OMP_NUM_THREADS"])
    if wanted is None:
        quota = len(affinity) if limits.cpus is None else math.ceil(limits.cpus)
        wanted = max(1, min(len(physical_cores(affinity, root)), quota))
    return ThreadPlan(num_threads=wanted)


def bind_setting(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that binds threads, and its value; "auto" if none is set."""
    return next(((name, env[name]) for name in BIND_VARIABLES if env.get(name)), ("", "auto"))


def _parts(name: str, value: str, num_ranks: int, affinity: set[int]) -> list[frozenset[int]]:
    """Return each rank's CPUs. Raises StartupError if lists are missing or a CPU is not available to this process."""
    parts = [parse_cpu_list(part, name) for part in value.split("|")][:num_ranks]
    if len(parts) < num_ranks:
        raise StartupError(
            f"{name}={value}: {num_ranks} ranks need {num_ranks} lists of CPUs, separated by |, but "
            f"there are {len(parts)}: write one for each rank, for example 0-3|4-7, or unset it."
        )
    if missing := frozenset().union(*parts) - affinity:
        raise StartupError(
            f"{name}={value}: CPUs {sorted(missing)} are not available; available CPUs: {sorted(affinity)}."
        )
    return parts


def parse_cpu_list(text: str, name: str) -> frozenset[int]:
    try:
        cpus: set[int] = set()
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            cpus.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise StartupError(f"{name}={text}: this is not a list of CPUs; write, for example, 0-3,8.") from None
    if not cpus:
        raise StartupError(f"{name}={text}: this list of CPUs is empty; write, for example, 0-3,8.")
    return frozenset(cpus)


def physical_cores(cpus: set[int], root: Path = Path("/")) -> set[int]:
    """Return one of the given CPUs for each physical core."""
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings = topology.read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, cpu)
    return set(cores.values())


def bind(plan: ThreadPlan) -> None:
    """Bind threads to the plan's CPUs. Call this before the first parallel kernel: new threads inherit the affinity."""
    if plan.cpus is not None:
        os.sched_setaffinity(0, plan.cpus)


def nodes_to_interleave(cpus: Set[int], root: Path = Path("/")) -> frozenset[int]:
    """Return the nodes of these CPUs on which the process may allocate memory; empty if there are fewer than two."""
    nodes = frozenset(_nodes(cpus, root))
    return nodes if len(nodes) > 1 else frozenset()


def node_of_rank(
    rank: int, num_ranks: int, *, num_threads: int, affinity: Set[int], root: Path = Path("/")
) -> frozenset[int] | None:
    """Return the CPUs of the node of a rank, within the affinity.

    Return None unless each rank can have a node with usable memory and a physical core for each thread.
    """
    nodes = [cpus for _, cpus in sorted(_nodes(affinity, root).items())]
    large = [cpus for cpus in nodes if len(physical_cores(set(cpus), root)) >= num_threads]
    return large[rank] if len(large) >= num_ranks else None


def _nodes(cpus: Set[int], root: Path) -> dict[int, frozenset[int]]:
    """Return the CPUs of each node on which the process may allocate memory; only CPUs in `cpus` count."""
    allowed = _allowed_nodes(root)
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node, own = int(folder.name.removeprefix("node")), _read_list(folder / "cpulist") & cpus
        if own and (allowed is None or node in allowed):
            nodes[node] = own
    return nodes


def interleave_memory(nodes: frozenset[int]) -> None:
    """Interleave new memory of this thread, and of threads that it starts. A policy that `numactl` has set stays.

    Containers often forbid the system call; this is logged with a remedy, and is not an error.
    """
    if not nodes or platform.machine() not in _CALLS:
        return
    get_policy, set_policy = _CALLS[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    mode, words = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // 64))()
    failed = libc.syscall(get_policy, ctypes.byref(mode), None, 0, None, 0)
    if not failed and mode.value != _MPOL_DEFAULT:
        return
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    failed = failed or libc.syscall(set_policy, _MPOL_INTERLEAVE, words, ctypes.c_ulong(_MOST_NODES))
    shown = ", ".join(map(str, sorted(nodes)))
    if failed:
        _LOGGER.warning(
            "memory is not interleaved over the NUMA nodes %s: %s; allow it (in containers: the capability SYS_NICE), "
            "or bind the engine to the CPUs of one node",
            *(shown, os.strerror(ctypes.get_errno())),
        )
    else:
        _LOGGER.info("memory is interleaved over the NUMA nodes %s", shown)


def _allowed_nodes(root: Path) -> frozenset[int] | None:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return None
    text = next((line.partition(":")[2].strip() for line in lines if line.startswith("Mems_allowed_list:")), "")
    return parse_cpu_list(text, "Mems_allowed_list") if text else None


def _read_list(path: Path) -> frozenset[int]:
    """Read a list of numbers such as 0-3,8. The list of a node without CPUs is empty."""
    try:
        text = path.read_text().strip()
    except OSError:
        text = ""
    return parse_cpu_list(text, str(path)) if text else frozenset()
