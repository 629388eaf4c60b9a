"""An hour of mixed traffic while each process of two engines and a router is killed once every ten minutes.

Two tenants send chats, completions, images, requests for adapters, grammars, forced tool calls, invalid requests, and
requests that their clients leave. `greedy` sends far more than its limits allow; it pauses for the first of every four
minutes, so that `polite` has a rate of its own to compare with.

kill -9 ends the server, the engine core and the image process of one engine for each of two models, and one router;
the script starts again what ends. A second engine of each model and a second router are never killed: their memory,
open files and threads are compared between the minutes 15 to 20 and 55 to 60 (the same parts of a shorter run). The
processes that are killed are compared at the same age.

Goals: each request has one end, and each failure that a client sees has a kill as its cause; nothing that is never
killed grows by more than 3 %; the polite tenant keeps half of its rate; afterwards no server holds a request.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import aiohttp
from router_processes import Killable
from soak_figures import DETECTION_S, ORDINARY, UNKILLED_ROUTER, Run, ends_by_kill, growths, judge
from soak_processes import KEYS, Kill, kill, look, pairs
from soak_traffic import GREEDY_KINDS, KINDS, Request, draft, send
from table import number, print_table, save_json

#: In this order, at equal distances within `KILLING` of every ten minutes.
KILLED = ("text-1 server", "sight-1 core", "router-1 server", "text-1 core", "sight-1 media", "sight-1 server")
KILLING = (0.05, 0.95)
#: Clients of a tenant, and the mean pause of each one after a request.
POLITE, GREEDY = (3, 0.2), (10, 0.4)
#: Gauges that are 0 when a server has no request.
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "octavo_router_inflight")


async def client(run: Run, routers: dict[str, Killable], tenant: str, dice: random.Random, over: asyncio.Event) -> None:
    """Send one request after the other, whether or not earlier ones were refused."""
    (_, pause_s), kinds = (POLITE, KINDS) if tenant == "polite" else (GREEDY, GREEDY_KINDS)
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            (name, await stack.enter_async_context(aiohttp.ClientSession(router.url, headers=headers)))
            for name, router in routers.items()
        ]
        while not over.is_set():
            if tenant == "polite" or not run.is_alone(time.monotonic()):
                kind, (router, session) = dice.choices([*kinds], [*kinds.values()])[0], dice.choice(sessions)
                run.requests.append(Request(tenant, kind, router, time.monotonic()))
                await send(session, run.requests[-1], draft(kind, dice))
            await asyncio.sleep(pause_s * dice.uniform(0.5, 1.5))


async def kill_in_turn(run: Run, servers: dict[str, Killable], over: asyncio.Event) -> None:
    first, last = KILLING
    for i, process in enumerate(itertools.cycle(KILLED)):
        cycle, turn = divmod(i, len(KILLED))
        due_s = run.kill_every_s * (cycle + first + turn * (last - first) / len(KILLED))
        if due_s > run.seconds - DETECTION_S:
            return
        await elapse(over, run.began_s + due_s - time.monotonic())
        name, _, role = process.partition(" ")
        run.kills.append(Kill(process, name, time.monotonic()))
        await kill(servers[name], role, run.kills[-1])


async def sample(run: Run, servers: dict[str, Killable], every_s: float, over: asyncio.Event) -> None:
    while not over.is_set():
        for name, server in servers.items():
            run.samples += look(name, server)
            await asyncio.sleep(0)
        await elapse(over, every_s)


async def report(run: Run, over: asyncio.Event) -> None:
    """Print a line each minute."""
    while not over.is_set():
        await elapse(over, 60)
        now = time.monotonic()
        ends = Counter(each.end for each in run.requests if each.ended_s > now - 60)
        shown = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        num_faults = sum(each.ended_s > 0 for each in run.faults())
        minute = (now - run.began_s) / 60
        print(f"minute {minute:.1f}: {shown}; {len(run.kills)} kills, {num_faults} faults", flush=True)


async def elapse(over: asyncio.Event, seconds: float) -> None:
    """Wait for a time, or until the run is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), max(0.0, seconds))


async def soak(run: Run, servers: dict[str, Killable], sample_every_s: float, seed: int) -> None:
    over, run.began_s = asyncio.Event(), time.monotonic()
    routers = {name: server for name, server in servers.items() if name.startswith("router")}
    async with asyncio.TaskGroup() as group:
        for i, tenant in enumerate(["polite"] * POLITE[0] + ["greedy"] * GREEDY[0]):
            group.create_task(client(run, routers, tenant, random.Random(f"{seed} {i}"), over))
        group.create_task(sample(run, servers, sample_every_s, over))
        group.create_task(kill_in_turn(run, servers, over))
        group.create_task(report(run, over))
        await asyncio.sleep(run.seconds)
        over.set()
    for _ in range(20):
        await asyncio.sleep(0.5)
        gauges = [
            (name, line, value) for name in servers for line, value in (await metrics(servers[name], IDLE)).items()
        ]
        run.busy = {f"{name} {line}": value for name, line, value in gauges if value}
        if not run.busy:
            break
    run.num_counted = int(sum((await metrics(routers[UNKILLED_ROUTER], ("octavo_router_requests_total",))).values()))


async def metrics(server: Killable, names: tuple[str, ...]) -> dict[str, float]:
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith(names)]
    return {line: float(line.rsplit(" ", 1)[1]) for line in lines}


def show(run: Run) -> bool:
    ends = Counter((each.tenant, each.kind, each.end) for each in run.requests)
    print_table("requests", ("tenant", "kind", "end", "number"), [(*key, count) for key, count in sorted(ends.items())])
    rates = [(name, *(number(run.rate(name, alone=alone)) for alone in (True, False))) for name in KEYS]
    print_table("requests answered per second", ("", "without greedy", "with greedy"), rates)
    header = ("killed", "times", "s until ready", "cut", "no connection", "error event")
    print_table("kills, and the ends of requests that they explain", header, ends_by_kill(run))
    grown = growths(run)
    rows = [(g.process, g.figure, number(g.first), number(g.last), f"{g.relative:+.1%}") for g in grown]
    print_table("growth", ("process", "figure", "first", "last", "growth"), rows)
    for request in [*run.faults()][:20]:
        print(request)
    for line in run.busy:
        print(line)
    verdicts = judge(run, grown)
    rows = [(what, value, "yes" if met else "NO") for what, value, met in verdicts]
    print_table("goals", ("", "figure", "met"), rows)
    return all(met for *_, met in verdicts)


def content(run: Run) -> dict[str, object]:
    """Return what is saved: all samples and kills, the requests that failed, and the number of all by minute."""
    minutes = Counter((int((r.began_s - run.began_s) / 60), r.tenant, r.kind, r.end) for r in run.requests)
    return {
        "began_s": run.began_s,
        "requests": [[*key, count] for key, count in sorted(minutes.items())],
        "failed": [asdict(each) for each in run.requests if each.end not in ORDINARY],
        "kills": [asdict(each) for each in run.kills],
        "samples": [asdict(each) for each in run.samples],
        "growth": [asdict(each) for each in growths(run)],
        "goals": judge(run, growths(run)),
        "busy": run.busy,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="length of the run. Default: 60")
    parser.add_argument("--kill-every", type=float, default=10, help="minutes between kills of a process. Default: 10")
    parser.add_argument("--sample-every", type=float, default=10, help="seconds between samples. Default: 10")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests. Default: 0")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the servers. Default: they are removed")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        servers = stack.enter_context(pairs(folder))
        names = {server.name: name for name, server in servers.items()}
        run = Run(names, 60 * arguments.minutes, 60 * arguments.kill_every, time.monotonic())
        try:
            asyncio.run(soak(run, servers, arguments.sample_every, arguments.seed))
        finally:
            met = show(run)
            save_json(arguments.json, content(run))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
