"""Remove one of several replicas in mid-run in virtual time; compare victims by the dip of the prefix-cache hit rate.

The dip is the hit rate (share of prompt tokens found in a cache) in the window before the removal less that in the
window after it. `least worth` removes the replica with the least `worth_tokens`, summed over all routers; `random` is
the mean over all replicas. Example: router_scale_down.py --load skewed even --seeds 20 --jobs 2
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from router_sim.scale_down import LOADS, Dips, ScaleDown, measure
from router_sim.study import run_each
from table import print_table, save_json
from tqdm import tqdm

HEADER = ("victim", "mean dip", "standard error", "less than random in", "mean gain over random", "standard error")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    cases = [
        ScaleDown(load=load, seed=seed, replicas=args.replicas, routers=args.routers, rate=args.rate,
                  drain_s=args.drain_s, window_s=args.window_s)
        for load in args.load
        for seed in range(args.seeds)
    ]  # fmt: skip
    with tqdm(total=len(cases), desc="seeds", disable=args.quiet) as bar:
        found = dict(run_each(measure, cases, jobs=args.jobs, on_done=bar.update))
    for load in args.load:
        of = [found[case] for case in cases if case.load == load]
        title = f"{load}: {args.replicas} to {args.replicas - 1} replicas, {len(of)} seeds"
        print_table(f"{title}, hit rate before {100 * fmean(d.before for d in of):.1f} %; points", HEADER, rows(of))
    save_json(
        args.json,
        {
            f"{case.load} {case.seed}": {"worth_tokens": d.worth_tokens, "dips": d.dips, "before": d.before}
            for case, d in found.items()
        },
    )


def rows(found: Sequence[Dips]) -> list[list[str]]:
    victims = {
        "least worth": [d.least_worth for d in found],
        "random": [d.random for d in found],
        "most worth": [d.most_worth for d in found],
    }
    return [row(name, dips, victims["random"]) for name, dips in victims.items()]


def row(name: str, dips: Sequence[float], random: Sequence[float]) -> list[str]:
    gains = [other - dip for dip, other in zip(dips, random, strict=True)]
    compared = [f"{sum(gain > 0 for gain in gains)}", *mean_and_error(gains)] if name != "random" else [""] * 3
    return [name, *mean_and_error(dips), *compared]


def mean_and_error(values: Sequence[float]) -> list[str]:
    """Return the mean and its standard error, in percentage points."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [f"{100 * fmean(values):.2f}", f"{100 * error:.2f}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=[*LOADS], default=[*LOADS], metavar="NAME",
                        help=f"popularity of the system prompts, of {', '.join(LOADS)}. Default: all")  # fmt: skip
    parser.add_argument("--replicas", type=int, default=4, help="replicas before the removal. Default: 4")
    parser.add_argument("--routers", type=int, default=2, help="routers that share the requests. Default: 2")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second. Default: 8")
    parser.add_argument("--drain-s", type=float, default=30.0, help="time of the removal, in seconds. Default: 30")
    parser.add_argument("--window-s", type=float, default=12.0, help="length of each window, in seconds. Default: 12")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds, from 0. Default: 20")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent seeds. Default: 1")
    parser.add_argument("--json", type=Path, help="file for the worth and the dip of every replica and seed")
    parser.add_argument("--quiet", action="store_true", help="hide the progress bar")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
