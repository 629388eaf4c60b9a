"""Targets of attacks: `octavo route` over recording replicas, and `octavo serve` over the scripted engine.

Each target is a process on a loopback port. `prompts` returns every prompt that reached a replica or the engine.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from octavo_server.kv.card import model_card

from octavo_testing.prompt_log import PROMPT_LOG, read_prompt_log
from octavo_testing.raw_http import MODEL
from octavo_testing.recording_replica import RecordingReplica
from octavo_testing.route_command import SERVE_FLAGS, octavo_route
from octavo_testing.scripted import write_byte_model
from octavo_testing.scripted_serve import SCRIPTED_SERVE
from octavo_testing.serve_command import octavo_serve
from octavo_testing.server import ScriptedClient

QUIET = ("--disable-uvicorn-access-log", "--uvicorn-log-level", "error")


@dataclass(frozen=True, slots=True)
class AttackTarget:
    port: int
    process: psutil.Process
    prompts: Callable[[], list[str]]
    replicas: Sequence[RecordingReplica] = ()

    @property
    def rss_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory since `reset_peak`, in bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return int(peak) * 1024


@asynccontextmanager
async def router_target(
    folder: Path, replicas: Sequence[RecordingReplica], *flags: str, max_files: int | None = None
) -> AsyncIterator[AttackTarget]:
    """Start the replicas and a router that can route to all of them; stop them all afterwards."""
    prompts: list[str] = []
    (folder / "card").mkdir()
    card = model_card(ScriptedClient(write_byte_model(folder / "card")), (MODEL,), cache_isolation=False)
    async with AsyncExitStack() as stack:
        for replica in replicas:
            replica.prompts = prompts
            replica.show_card(card)
            await replica.start()
            stack.push_async_callback(replica.stop)
        named = [word for replica in replicas for word in ("--replica", replica.url)]
        route = stack.enter_context(octavo_route(folder, *named, *QUIET[1:], *flags, max_files=max_files))
        await asyncio.to_thread(route.wait_until, lambda found: _num_routable(found) == len(replicas))
        assert route.process is not None
        yield AttackTarget(route.port, psutil.Process(route.process.pid), lambda: prompts, replicas)


@asynccontextmanager
async def engine_target(folder: Path, *flags: str, max_files: int | None = None) -> AsyncIterator[AttackTarget]:
    (folder / "model").mkdir()
    model, log = str(write_byte_model(folder / "model")), folder / "prompts.log"
    env = {**os.environ, PROMPT_LOG: str(log)}
    words = (model, *SERVE_FLAGS, *QUIET, *flags)
    with octavo_serve(folder, *words, module=SCRIPTED_SERVE, env=env, max_files=max_files) as serving:
        port = int(serving.url.rpartition(":")[2])
        yield AttackTarget(port, psutil.Process(serving.process.pid), lambda: read_prompt_log(log))


def _num_routable(found: dict[str, dict[str, object]]) -> int:
    return sum(replica["state"] in ("exact", "blind") for replica in found.values())
