"""Chooses the number of compute threads and their CPUs from affinity, cgroup quota and environment variables.

`OCTAVO_CPU_OMP_THREADS_BIND` or `VLLM_CPU_OMP_THREADS_BIND` is a list of CPUs ("0-3,8"; "0-3|4-7" has a part for each
rank), "nobind" or "auto". By default there is one thread per physical core within affinity and quota.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.devices.cgroup import CgroupLimits
from octavo_engine.wire.errors import StartupError

BIND_VARIABLES = ("OCTAVO_CPU_OMP_THREADS_BIND", "VLLM_CPU_OMP_THREADS_BIND")


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

    `rank`: takes its part of the CPUs that a variable binds; the parts of all `num_ranks` are checked.
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
    """Return the CPUs of each rank. Raises StartupError if there are too few parts, or CPUs that are not available."""
    parts = [parse_cpu_list(part, name) for part in value.split("|")][:num_ranks]
    if len(parts) < num_ranks:
        raise StartupError(
            f"{name}={value}: --tensor-parallel-size {num_ranks} needs {num_ranks} lists of CPUs, separated by |, but "
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
    """Bind threads to the plan's CPUs. Call it before the first parallel kernel: new threads inherit the affinity."""
    if plan.cpus is not None:
        os.sched_setaffinity(0, plan.cpus)
