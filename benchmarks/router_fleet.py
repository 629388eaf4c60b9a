"""Cost of following a fleet: cores of `octavo route` with 100 replicas that publish steps, and with idle ones.

The replicas are fake, their frames are real: each step stores and removes blocks and changes the load. Cores are CPU
seconds of the router's process per wall second, after all replicas were admitted. Goals: 0.5 core with 20 frames per
second of each replica, 0.1 core with heartbeats only.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dev_packages import psutil
from fake_fleets import fake_fleet
from table import Samples, print_table, save_json

START_S = 60


@contextmanager
def octavo_route(urls: list[str], port: int) -> Iterator[psutil.Process]:
    flags = [part for url in urls for part in ("--replica", url)]
    command = [sys.executable, "-m", "octavo_server.cli.main", "route", "--port", str(port), "--host", "127.0.0.1"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, env=os.environ) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def wait_until_admitted(port: int, count: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                found = re.search(r"^octavo_router_endpoints_admitted(?:{.*})? (\d+)", answer.read().decode(), re.M)
        except OSError:
            found = None
        if found is not None and int(found[1]) == count:
            return
        time.sleep(0.2)
    raise SystemExit(f"not all {count} replicas were admitted after {START_S} s")


def measure(replicas: int, rate: float, *, seconds: float, port: int, blocks: int) -> tuple[float, float]:
    """Return the cores, and the CPU microseconds per frame; at rate 0, per heartbeat."""
    with fake_fleet(replicas=replicas, rate=rate, blocks=blocks) as fakes, octavo_route(fakes.urls, port) as router:
        wait_until_admitted(port, replicas)
        time.sleep(1)
        began, before = time.monotonic(), router.cpu_times()
        time.sleep(seconds)
        took, after = time.monotonic() - began, router.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return cpu_s / took, 1e6 * cpu_s / took / (replicas * (rate or 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20, help="frames per second of each replica. Default: 20")
    parser.add_argument("--blocks", type=int, default=4, help="blocks that each frame stores and removes. Default: 4")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of one measurement. Default: 10")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each case. Default: 3")
    parser.add_argument("--port", type=int, default=18_800, help="port of the router. Default: 18800")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    cases = {f"{args.rate:g} frames a second each": args.rate, "heartbeats only": 0.0}
    rows, saved = [], {}
    for name, rate in cases.items():
        measured = [
            measure(args.replicas, rate, seconds=args.seconds, port=args.port, blocks=args.blocks)
            for _ in range(args.repetitions)
        ]
        cores, frame_us = (Samples(tuple(values)) for values in zip(*measured, strict=True))
        rows.append([name, cores, frame_us])
        saved[name] = {"cores": cores, "us_per_frame": frame_us}
    print_table(f"{args.replicas} replicas: median [min, max]", ["", "cores", "us CPU a frame"], rows)
    save_json(args.json, saved)


if __name__ == "__main__":
    main()
