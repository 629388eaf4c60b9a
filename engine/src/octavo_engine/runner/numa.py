"""Interleaves memory over the NUMA nodes of the compute threads, so that every node's memory channels serve each step.

Linux places a page on the node of the thread that writes it first: one loading thread would place all weights on one
node, and the threads of other nodes would read them over the link between the sockets. Threads inherit the policy from
the thread that starts them. `root` is "/" in production; tests pass a tree of files.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Set
from pathlib import Path

from octavo_engine.runner.cpu_threads import parse_cpu_list

_LOGGER = logging.getLogger(__name__)
_MPOL_DEFAULT, _MPOL_INTERLEAVE = 0, 3
#: Machine -> numbers of the system calls get_mempolicy and set_mempolicy, which libc does not wrap.
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_MOST_NODES = 1024  # of Linux


def nodes_to_interleave(cpus: Set[int], root: Path = Path("/")) -> frozenset[int]:
    """Return the nodes of these CPUs whose memory the process may use; empty if they are fewer than two."""
    allowed = _allowed_nodes(root)
    found = set()
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node, listed = int(folder.name.removeprefix("node")), _read_list(folder / "cpulist")
        if listed & cpus and (allowed is None or node in allowed):
            found.add(node)
    return frozenset(found) if len(found) > 1 else frozenset()


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
