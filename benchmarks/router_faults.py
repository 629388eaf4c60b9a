"""Faults of a KV stream at a million entries: time to detection, time to resync, and pauses for other requests.

Fake replicas in a separate process take 20 steps per second each; one of them loses, repeats, reorders or falsifies a
frame, or restarts. The fleet follows them on uvloop while requests are routed all the time. The delay of a timer of
1 ms is the pause that any request would see; `cpu` is the part of it that this thread computed, which does not depend
on other load. Divergence counts entries that the index has and the replica lacks, or the reverse. Goals: detection
within 1 s, resync within 3 s, no pause above 50 ms, divergence 0, 150 MB for a million entries.
"""

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import support_path  # noqa: F401  (makes octavo_testing importable)
import uvloop
from fake_fleets import FakeFleet, fake_fleet
from octavo_server.router.balance.picker import Picker
from octavo_server.router.fleet.endpoint import StaticDiscovery
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import DEVICE, PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts.prompt import Prompt
from octavo_testing.fake_replica import MODEL
from table import Samples, print_table, save_json

FAULTS = ("lose", "repeat", "reorder", "lie", "restart")
MILLION = 1_000_000
LIMIT_S = 30.0
BETWEEN_S = 6.0  # with frequent faults the KV stream client backs off longer


class PauseMeter:
    """Routes a request each millisecond; `worst_s` is the largest delay, `worst_cpu_s` the CPU time in between."""

    def __init__(self, fleet: Fleet, picker: Picker) -> None:
        self.reset()
        self._fleet = fleet
        self._picker = picker

    def reset(self) -> None:
        self.worst_s = self.worst_cpu_s = 0.0
        self.num_unserved = 0

    async def run(self) -> None:
        dice, clock = random.Random(1), time.perf_counter
        while True:
            due, cpu_s = clock() + 0.001, time.thread_time()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, clock() - due)
            self.worst_cpu_s = max(self.worst_cpu_s, time.thread_time() - cpu_s)
            self._decide([dice.getrandbits(64) for _ in range(30)])

    def _decide(self, hashes: list[int]) -> None:
        replicas = self._fleet.routable(MODEL)
        if not replicas:
            self.num_unserved += 1
            return
        prompt = Prompt(num_tokens=480, affinity=hashes[0], hashes=hashes, is_exact=True)
        ticket = self._picker.lease(self._picker.pick(prompt, replicas), prompt)
        ticket.record_first_byte()
        ticket.release("ok")


async def until(holds: Callable[[], object]) -> float:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)
    return time.monotonic()


def divergence(index: PrefixIndex, replica: Replica, truth: dict[str, Any]) -> int:
    """Compare the index's own entries with the replica's blocks."""
    assert replica.blocks is not None
    bit = DEVICE << 3 * replica.blocks.slot
    has = [h for part in (*index._young, *index._old) for h, mask in part.items() if mask & bit]
    missing = abs(len(has) - int(truth["count"]))
    return missing or int(reduce(xor, has, 0) != truth["digest"])


async def measure_fault(fleet: Fleet, fakes: FakeFleet, kind: str, pauses: PauseMeter) -> dict[str, float]:
    replica = next(r for r in fleet.replicas if r.url == fakes.urls[0])
    faults, epoch = replica.num_faults, replica.admitted_epoch
    pauses.reset()
    injected = asyncio.create_task(asyncio.to_thread(fakes.ask, kind, 0))
    noticed_s = await until(lambda: not replica.is_exact or replica.num_faults > faults)
    exact_s = await until(lambda: replica.is_exact and (kind != "restart" or replica.admitted_epoch != epoch))
    swept_s = await until(lambda: fleet.index.sweep(0) == 0)
    at_s = float((await injected)["at"])
    return {
        "distrusted_s": max(0.0, noticed_s - at_s),
        "exact_s": exact_s - at_s,
        "swept_s": swept_s - at_s,
        "pause_ms": 1000 * pauses.worst_s,
        "cpu_ms": 1000 * pauses.worst_cpu_s,
        "unserved": pauses.num_unserved,
    }


async def settled_divergence(fleet: Fleet, fakes: FakeFleet) -> int:
    """Return 0 as soon as index and replica agree once: the replica keeps working, and may be a frame ahead."""
    replica = next(r for r in fleet.replicas if r.url == fakes.urls[0])
    found = -1
    for _ in range(20):
        truth = await asyncio.to_thread(fakes.ask, "digest", 0)
        await asyncio.sleep(0.01)
        found = divergence(fleet.index, replica, truth)
        if found == 0:
            break
    return found


async def measure(replicas: int, entries: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    index = PrefixIndex(max_entries=4 * MILLION)
    picker = Picker(index, clock=time.monotonic)
    results: dict[str, dict[str, list[float]]] = {}
    with fake_fleet(replicas=replicas, rate=20, stored=entries // replicas) as fakes:
        before_mb = resident_mb()
        fleet = Fleet(FollowSettings(), StaticDiscovery(fakes.urls), index)
        fleet.on_load_update.append(picker.record_load)
        pauses = PauseMeter(fleet, picker)
        began_s = time.monotonic()
        await fleet.start()
        ticking = asyncio.create_task(pauses.run())
        joined_s = await until(lambda: len(fleet.routable(MODEL)) == replicas) - began_s
        await asyncio.sleep(1)
        memory_mb = (resident_mb() - before_mb) * MILLION / len(index)
        joined = {"exact_s": joined_s, "pause_ms": 1000 * pauses.worst_s, "cpu_ms": 1000 * pauses.worst_cpu_s}
        results["join"] = {key: [value] for key, value in joined.items()} | {"mb_per_million": [memory_mb]}
        for kind in FAULTS:
            for _ in range(repetitions):
                measured = await measure_fault(fleet, fakes, kind, pauses)
                ticking.cancel()
                measured["divergence"] = await settled_divergence(fleet, fakes)
                ticking = asyncio.create_task(pauses.run())
                await asyncio.sleep(BETWEEN_S)
                for key, value in measured.items():
                    results.setdefault(kind, {}).setdefault(key, []).append(value)
        ticking.cancel()
        await fleet.stop()
    return results


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=MILLION, help="entries of the index. Default: 1000000")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8], help="numbers of replicas. Default: 1 8")
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions of each fault. Default: 3")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    saved = {}
    for replicas in args.replicas:
        results = uvloop.run(measure(replicas, args.entries, args.repetitions))
        names = ["distrusted_s", "exact_s", "swept_s", "pause_ms", "cpu_ms", "divergence", "unserved", "mb_per_million"]
        rows = [
            [kind, *[Samples(tuple(found[n])) if n in found else "" for n in names]] for kind, found in results.items()
        ]
        print_table(f"{args.entries} entries, {replicas} replicas: median [min, max]", ["", *names], rows)
        saved[f"{replicas} replicas"] = results
    save_json(args.json, saved)


if __name__ == "__main__":
    main()
