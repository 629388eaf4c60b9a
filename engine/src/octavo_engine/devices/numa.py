"""Gives each rank of a model a NUMA node of its own, or interleaves memory over the nodes of the compute threads.

Linux places a page on the node of the thread that writes it first. So a rank that is bound to a node has its memory
there. But one loading thread of several nodes would place all weights on one of them, and the threads of the others
would read them over the link between the sockets: interleaved memory lets the channels of all nodes serve each step.
Threads inherit the policy from the thread that starts them. `root` is "/" in production; tests pass a tree of files.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Set
from pathlib import Path

from octavo_engine.devices.cpu_threads import parse_cpu_list, physical_cores

_LOGGER = logging.getLogger(__name__)
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
#: Machine -> numbers of the system calls get_mempolicy and set_mempolicy, which libc does not wrap.
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_MOST_NODES = 1024  # of Linux


def nodes_to_interleave(cpus: Set[int], root: Path = Path("/")) -> frozenset[int]:
    """Return the nodes of these CPUs whose memory the process may use; empty if they are fewer than two."""
    nodes = frozenset(_nodes(cpus, root))
    return nodes if len(nodes) > 1 else frozenset()


def node_of_rank(
    rank: int, num_ranks: int, *, num_threads: int, affinity: Set[int], root: Path = Path("/")
) -> frozenset[int] | None:
    """Return the CPUs of the node of a rank, within the affinity.

    None unless there are nodes for all ranks, with a physical core for each thread, whose memory the process may use.
    """
    nodes = [cpus for _, cpus in sorted(_nodes(affinity, root).items())]
    large = [cpus for cpus in nodes if len(physical_cores(set(cpus), root)) >= num_threads]
    return large[rank] if len(large) >= num_ranks else None


def _nodes(cpus: Set[int], root: Path) -> dict[int, frozenset[int]]:
    """Return those of the CPUs that belong to each node whose memory the process may use."""
    allowed = _allowed_nodes(root)
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node, own = int(folder.name.removeprefix("node")), _read_list(folder / "cpulist") & cpus
        if own and (allowed is None or node in allowed):
            nodes[node] = own
    return nodes


def interleave_memory(nodes: frozenset[int]) -> None:
    """Set the policy of this thread and of threads that it starts. A policy of `numactl` stays.

    Containers often forbid the call; this is logged with the remedy, and no error is raised.
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
    """Read a list of numbers such as 0-3,8. A node without CPUs has an empty list."""
    try:
        text = path.read_text().strip()
    except OSError:
        text = ""
    return parse_cpu_list(text, str(path)) if text else frozenset()
