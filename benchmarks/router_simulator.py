"""Compare routing policies in virtual time with real schedulers and the real router (routing-study/README.md).

Example: router_simulator.py --workload chat hot --replicas 8 --load 0.3 0.7 1.0 --plot results/routing
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from router_sim.figures import Figures, medians
from router_sim.hardware import HARDWARE
from router_sim.policies import POLICIES
from router_sim.study import Case, Setting, as_json, capacities, from_json, run_all
from router_sim.workloads import WORKLOADS
from table import number, print_table
from tqdm import tqdm

HEADER = (
    *("policy", "load %", "goodput/s", "of offered %", "errors", "TTFT ms", "p50", "p99"),
    *("hits %", "of oracle", "skew", "busy skew", "off %"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    settings = [
        Setting(
            workload=workload,
            replicas=replicas,
            hardware=args.hardware,
            requests=args.requests or requests_for(replicas),
            seed=seed,
            blocks=args.blocks,
            routers=args.routers,
        )
        for workload in args.workload
        for replicas in args.replicas
        for seed in args.seed
    ]
    with tqdm(total=len(settings), desc="capacities", disable=args.quiet) as bar:
        found = capacities(settings, jobs=args.jobs, on_done=bar.update)
    cases = [
        Case(setting=setting, policy=policy, load=load, rate=load * found[setting])
        for setting in settings
        for load in args.load
        for policy in args.policy
    ]
    results = saved_in(args.json)
    todo = [case for case in cases if case not in results]
    with tqdm(total=len(todo), desc="runs", disable=args.quiet) as bar:
        for case, figures in run_all(todo, jobs=args.jobs, on_done=bar.update):
            results[case] = figures
            save(args.json, results)
    results = over_seeds({case: results[case] for case in cases})
    for setting in dict.fromkeys(case.setting for case in results):
        rate = median(rate for of, rate in found.items() if without_seed(of) == setting)
        title = f"{setting.workload}, {setting.replicas} replicas ({args.hardware}), capacity {number(rate)}/s"
        rows = [row(case, figures) for case, figures in results.items() if case.setting == setting]
        print_table(f"{title}: {WORKLOADS[setting.workload].description}", HEADER, rows)
    if args.plot:
        from router_sim.charts import save_charts  # matplotlib is slow to import

        for path in save_charts(args.plot, results):
            print(f"saved: {path}")


def over_seeds(results: dict[Case, Figures]) -> dict[Case, Figures]:
    """Return the median of each figure over seeds, by the case without seed and rate."""
    runs: dict[Case, list[Figures]] = {}
    for case, found in results.items():
        runs.setdefault(replace(case, setting=without_seed(case.setting), rate=0.0), []).append(found)
    return {case: medians(of) for case, of in runs.items()}


def without_seed(setting: Setting) -> Setting:
    return replace(setting, seed=0)


def saved_in(path: Path | None) -> dict[Case, Figures]:
    """Return the saved runs, which are not repeated because runs are reproducible."""
    if path is None or not path.exists():
        return {}
    return dict(map(from_json, json.loads(path.read_text())["runs"]))


def save(path: Path | None, results: dict[Case, Figures]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"runs": [as_json(*result) for result in results.items()]}, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS], metavar="NAME",
                        help=f"workloads, of {', '.join(WORKLOADS)}. Default: all")  # fmt: skip
    parser.add_argument("--policy", nargs="+", choices=[*POLICIES], default=[*POLICIES], metavar="NAME",
                        help=f"policies, of {', '.join(POLICIES)}. Default: all")  # fmt: skip
    parser.add_argument(
        "--load", nargs="+", type=float, default=[0.3, 0.6, 0.9, 1.2], help="shares of capacity. Default: 0.3 to 1.2"
    )
    parser.add_argument("--replicas", nargs="+", type=int, default=[8], help="numbers of replicas. Default: 8")
    parser.add_argument("--requests", type=int, help="approximate requests per run. Default: 1000 + 125 per replica")
    parser.add_argument("--hardware", choices=[*HARDWARE], default="a10g-7b", help="replica model. Default: a10g-7b")
    parser.add_argument(
        "--seed", nargs="+", type=int, default=[0], help="seeds; medians over them are shown. Default: 0"
    )
    parser.add_argument("--blocks", type=int, help="KV blocks of each replica. Default: the hardware's")
    parser.add_argument(
        "--routers", type=int, default=1, help="independent routers that share the requests. Default: 1"
    )
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs. Default: 1")
    parser.add_argument("--json", type=Path, help="file for all figures; runs in it are not repeated")
    parser.add_argument("--plot", type=Path, help="folder for a PNG and an SVG per workload and number of replicas")
    parser.add_argument("--quiet", action="store_true", help="hide the progress bar")
    return parser.parse_args(arguments)


def requests_for(replicas: int) -> int:
    return 1000 + 125 * replicas


def row(case: Case, found: Figures) -> list[str]:
    milliseconds = [number(1000 * s) for s in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s)]
    return [
        case.policy,
        f"{100 * case.load:.0f}",
        number(found.goodput),
        f"{100 * found.goodput / found.offered_rate:.0f}",
        str(found.errors),
        *milliseconds,
        f"{100 * found.hit_rate:.1f}",
        f"{found.hits_of_oracle:.3f}",
        f"{found.skew:.2f}",
        f"{found.busy_skew:.2f}",
        "" if found.expected_error is None else f"{100 * found.expected_error:.2f}",
    ]


if __name__ == "__main__":
    main()
