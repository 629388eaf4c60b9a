"""The router's prefix index: memory per million entries, its cap, and the cost of storing and matching.

An entry is a (hash, replica) pair. `spread`: every block is on one replica (the most memory); `shared`: on all of them.
"""

import argparse
import gc
import random
import struct
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from octavo_server.router.fleet.prefix_index import PrefixIndex
from table import Samples, number, print_table, save_json

GOAL_MB = 150  # of a million entries
MILLION = 1_000_000
PART = 2048  # blocks in one frame of a snapshot


def hashes(seed: int, count: int) -> bytes:
    """Return random hashes as bytes, as in a frame, so that the index creates its own integers."""
    return random.Random(seed).randbytes(8 * count)


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def fill(index: PrefixIndex, replicas: int, entries: int, *, shared: bool) -> list[float]:
    """Store parts for each replica; return the CPU seconds of each part."""
    took = []
    for replica in range(replicas):
        slot = index.acquire_slot()
        data = hashes(0 if shared else replica, entries // replicas)
        for start in range(0, len(data), 8 * PART):
            part = data[start : start + 8 * PART]
            started = time.thread_time()
            index.store(slot, struct.unpack(f"<{len(part) // 8}Q", part))
            took.append(time.thread_time() - started)
    return took


def measure_memory(replicas: int, entries: int, shared: bool) -> tuple[float, float]:
    """Return the MB of the entries, and the CPU milliseconds of the slowest part."""
    before = resident_mb()
    index = PrefixIndex(max_entries=4 * MILLION)
    took = fill(index, replicas, entries, shared=shared)
    return resident_mb() - before, 1000 * max(took)


def measure_cap(cap: int) -> tuple[float, float]:
    before = resident_mb()
    index = PrefixIndex(max_entries=cap)
    took = fill(index, 10, 10 * cap, shared=False)
    assert len(index) <= cap
    return resident_mb() - before, 1000 * max(took)


def measure_match(replicas: int, blocks: int, repetitions: int) -> Samples:
    """Measure the microseconds of a prompt that all replicas hold in full, which is the most work."""
    index = PrefixIndex(max_entries=4 * MILLION)
    slots = [index.acquire_slot() for _ in range(replicas)]
    prompt = struct.unpack(f"<{blocks}Q", hashes(1, blocks))
    for slot in slots:
        index.store(slot, prompt)
    took = []
    for _ in range(repetitions):
        started = time.perf_counter()
        index.match(prompt, slots)
        took.append(1e6 * (time.perf_counter() - started))
    return Samples(tuple(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=MILLION, help=f"entries of an index. Default: {MILLION}")
    parser.add_argument("--repetitions", type=int, default=200, help="matches of each case. Default: 200")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    cases = [(1, "spread"), (8, "spread"), (100, "spread"), (8, "shared"), (100, "shared")]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {
            f"{n} replicas, {kind}": pool.submit(measure_memory, n, args.entries, kind == "shared") for n, kind in cases
        }
        running["tenfold, with a cap"] = pool.submit(measure_cap, args.entries)
        memory = {name: measured.result() for name, measured in running.items()}
    rows = [[name, number(mb), number(pause)] for name, (mb, pause) in memory.items()]
    print_table(f"{args.entries} entries (goal of 1 M: {GOAL_MB} MB)", ["", "MB", "ms CPU of the longest store"], rows)
    matches = {
        f"{replicas} replicas, {blocks} blocks": measure_match(replicas, blocks, args.repetitions)
        for replicas in (1, 8, 100)
        for blocks in (64, 512)
    }
    print_table("match, microseconds: median [min, max]", ["", "us"], [[k, str(v)] for k, v in matches.items()])
    save_json(args.json, {"memory": memory, "match": matches})


if __name__ == "__main__":
    main()
