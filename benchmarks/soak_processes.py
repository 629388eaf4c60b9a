"""Engines and routers of `soak.py` as processes: what each of them holds, and their ends and restarts.

There is a pair of engines for a text model with adapters, a pair for a model that takes images, and a pair of routers
in front of all engines. The first of each pair is killed again and again, and the second one never is.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import support_path  # noqa: F401  (makes octavo_testing importable)
from dev_packages import psutil
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import byte_tokenizer, scramble, tiny_config
from octavo_testing.tiny_vision import make_tiny_vision
from router_processes import SERVE, Killable, Router
from soak_traffic import ADAPTERS, SIGHT, TEXT, warm_up
from transformers import AutoModelForCausalLM

SECRET = "soak"
KEYS = {"polite": "sk-polite", "greedy": "sk-greedy"}
LIMITS = {"requestsPerMinute": 180, "tokensPerMinute": 60_000, "concurrentRequests": 6, "maxTokens": 64}
LOOK_S = 0.1
LIMIT_S = 1800.0
#: Caches are small, so that they are full long before the first figures that count.
SERVE_FLAGS = ("--num-threads", "1", "--dtype", "float32", "--num-gpu-blocks-override", "1024", "--disable-log-stats")
SIGHT_FLAGS = ("--served-model-name", SIGHT, "--mm-processor-cache-gb", "0.002")
TEXT_FLAGS = ("--served-model-name", TEXT, "--max-model-len", "2048", "--disable-any-whitespace", "--enable-lora")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
#: Modules that the processes of a server run.
ROLES = {
    "server": "octavo_server.cli.main",
    "core": "octavo_engine.process.main",
    "media": "octavo_engine.media.worker",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """`private_bytes`: memory of the process that no other one shares. `at_s`: of the monotonic clock."""

    at_s: float
    process: str
    pid: int
    age_s: float
    private_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Kill:
    """`ready_s`: when the server served again. `num_left`: its processes that did not end with it."""

    process: str
    server: str
    at_s: float
    ready_s: float = math.inf
    num_left: int = 0


def roles(server: Killable) -> dict[str, psutil.Process]:
    """Return the processes of a server by their roles; some or all are missing while they start.

    A child that does not run its own command yet has its parent's: the first process of a role counts.
    """
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in (main := psutil.Process(server.pid), *main.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()
                found = {role: process for role, module in ROLES.items() if module in words} | found
    return found


def look(name: str, server: Killable) -> Iterator[Sample]:
    for role, process in roles(server).items():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError, ProcessLookupError):
            figures = int(process.memory_full_info().uss), int(process.num_fds()), int(process.num_threads())
            age_s = time.time() - process.create_time()
            yield Sample(time.monotonic(), f"{name} {role}", process.pid, age_s, *figures)


async def kill(server: Killable, role: str, killed: Kill) -> None:
    """Send SIGKILL to one process of a server, start the server again if it ends, and wait until it serves."""
    async with asyncio.timeout(LIMIT_S):
        while role not in (family := roles(server)):  # it has ended, and the server starts it again
            await asyncio.sleep(LOOK_S)
    killed.at_s = time.monotonic()
    family[role].kill()
    if role != "media":
        await asyncio.to_thread(server.wait)
        others = [process for other, process in family.items() if other != "server"]
        killed.num_left = len((await asyncio.to_thread(psutil.wait_procs, others, 10))[1])
        server.start()
    await until_ready(server)
    killed.ready_s = time.monotonic()


async def until_ready(server: Killable) -> None:
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(server.url) as session:
        while True:
            try:
                async with session.get("/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(LOOK_S)


def write_models(folder: Path) -> dict[str, Sequence[str]]:
    """Write both models with random weights; return the flags of each model's engines."""
    config = tiny_config("llama")
    config.update({"max_position_embeddings": 4096})
    model = AutoModelForCausalLM.from_config(config)
    scramble(model, 0)
    model.save_pretrained(folder / TEXT)
    byte_tokenizer().save(str(folder / TEXT / "tokenizer.json"))
    (folder / TEXT / "chat_template.jinja").write_text(TEMPLATE)
    pairs = enumerate(ADAPTERS)
    adapters = [f"{name}={write_adapter(folder / name, llama_pairs(seed=i))}" for i, name in pairs]
    few = ("--max-loras", "2", "--max-cpu-loras", "2", "--lora-modules", *adapters)
    return {
        TEXT: ("--model", str(folder / TEXT), *TEXT_FLAGS, *few),
        SIGHT: ("--model", str(make_tiny_vision("llava", folder)), *SIGHT_FLAGS),
    }


@contextmanager
def pairs(folder: Path) -> Iterator[dict[str, Killable]]:
    """Start all servers and yield them by name. The names of those that are never killed end with 2."""
    (folder / "keys").write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    limits = ", ".join(f"{name}: {value}" for name, value in LIMITS.items())
    (folder / "tenants.yaml").write_text(f"tenants: {{greedy: {{{limits}}}}}\n")
    command = [*SERVE["real"], "serve", "--router-secret", SECRET, *SERVE_FLAGS]
    servers: dict[str, Killable] = {}
    for model, flags in write_models(folder).items():
        for i in (1, 2):
            servers[f"{model}-{i}"] = Killable([*command, *flags], folder / f"{model}-{i}.log")
    engines = [*servers.values()]
    flags = ["--router-secret", SECRET, "--api-key-file", str(folder / "keys")]
    flags += ["--tenants-file", str(folder / "tenants.yaml")]
    for i in (1, 2):
        servers[f"router-{i}"] = Router(engines, folder / f"router-{i}.log", flags)
    try:
        for server in servers.values():
            server.start()
            if server not in engines[1:]:  # the first engine compiles and measures, and others use its results
                asyncio.run(until_ready(server))
        for server in servers.values():
            asyncio.run(until_ready(server))
        for model in (TEXT, SIGHT):
            asyncio.run(warm_up(servers[f"{model}-2"].url, model, SECRET))
        yield servers
    finally:
        for server in reversed(servers.values()):
            server.stop()
