"""A profile of decode steps: the GPU's work, the calls of the host that start it, and the share of time it idles.

On a CPU, operators of torch stand for the work, which checks this script only.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from octavo_engine.loop.engine_core import EngineCore
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_HOST_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or a copy; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`num_calls`: calls of the host that started the work of `num_steps` steps."""

    work: list[Work]
    num_calls: int
    num_steps: int

    def idle_share(self) -> float:
        """Return the share of the time from the first work's start to the last one's end in which nothing ran."""
        first = busy_until = min(each.start for each in self.work)
        idle = 0.0
        for each in sorted(self.work, key=lambda each: each.start):
            idle += max(each.start - busy_until, 0.0)
            busy_until = max(busy_until, each.end)
        return idle / (busy_until - first)

    def longest(self, count: int) -> list[tuple[str, float]]:
        """Return the names that take the most time, with their microseconds in a step."""
        totals = defaultdict[str, float](float)
        for each in self.work:
            totals[each.name[:NAME_LENGTH]] += each.end - each.start
        most = sorted(totals.items(), key=lambda item: -item[1])[:count]
        return [(name, total / self.num_steps) for name, total in most]


def profile_steps(core: EngineCore, device: str, num_steps: int) -> Profile:
    """Profile the next steps of a core whose requests all decode."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            core.step()
    events: list[Any] = list(profiler.events() or ())
    if device == "cuda":
        work = [event for event in events if event.device_type == DeviceType.CUDA]
        calls = sum(event.name.startswith(_HOST_CALLS) for event in events)
    else:
        work = [event for event in events if event.cpu_parent is None]
        calls = len(work)
    return Profile([Work(event.name, event.time_range.start, event.time_range.end) for event in work], calls, num_steps)
