"""The flags of `octavo bench`: vLLM's names and defaults, and a few of ours (--plot, --reset-prefix-cache, sweeps)."""

import argparse
import math
from typing import Any

from octavo_server.bench.names import DATASETS, LATENCY_NAMES
from octavo_server.cli.chat_flags import SAMPLING, json_object
from octavo_server.cli.flags import add_engine_flags
from octavo_server.cli.http_flags import port

BACKENDS = ("openai", "vllm", "openai-chat")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="KIND")
    for name, (text, run, add) in _KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        add(kind)
        kind.set_defaults(run=run)


def add_serve_bench_flags(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_load(parser)
    add_dataset_flags(parser)
    _add_sampling(parser)
    _add_measurement(parser)
    _add_results(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "Its key, where it wants one, is taken from $OPENAI_API_KEY.")
    group.add_argument("--backend", choices=BACKENDS, default="openai", help="which API (default: openai, completions)")
    group.add_argument("--base-url", metavar="URL", help="without /v1 (default: from --host and --port)")
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=port, default=8000, help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: /v1/completions, or the backend's)")
    group.add_argument("--model", metavar="NAME", help="(default: the server's first)")
    group.add_argument("--served-model-name", metavar="NAME", help="its name in requests, if not --model")
    group.add_argument("--tokenizer", metavar="MODEL", help="where the tokenizer comes from (default: the model)")
    group.add_argument("--header", nargs="*", metavar="KEY=VALUE", default=[], help="sent with each request")
    group.add_argument("--tokenizer-mode", choices=("auto", "hf"), default="auto", help="accepted; there is one kind")
    group.add_argument("--trust-remote-code", action="store_true", help="accepted; a tokenizer runs no code here")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=int,
        default=0,
        metavar="N",
        help="seconds to wait for the server (default: 0)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load", "A list (1,2,4,8) of rates or of concurrencies makes a sweep.")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests of a run (default: 1000)")
    group.add_argument(
        "--request-rate", type=_rates, default=(math.inf,), metavar="X", help="per second; inf: all at once (default)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: a Poisson process; less comes in bursts (default: 1)",
    )
    group.add_argument(
        "--max-concurrency", type=_counts, default=(None,), metavar="N", help="requests at a time (default: no limit)"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="raise the rate during the run")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="X", help="rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="rate at the end")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before the run (default: 0)")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")


def add_dataset_flags(parser: argparse.ArgumentParser, *, has_lengths: bool = True) -> None:
    """`has_lengths`: --input-len and --output-len are here, too."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", default="random", metavar="NAME", help=f"{', '.join(DATASETS)} (default: random)"
    )
    group.add_argument("--dataset-path", metavar="FILE", help="for those that are read from a file")
    group.add_argument("--no-oversample", action="store_true", help="do not repeat prompts when a file has too few")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of a custom file")
    group.add_argument(
        *("--skip-chat-template", "--custom-skip-chat-template"),
        dest="skip_chat_template",
        action="store_true",
        help="custom prompts go to the completions API as they are",
    )
    if has_lengths:
        group.add_argument("--input-len", type=int, metavar="N", help="overrides the dataset's own input length")
        group.add_argument("--output-len", type=int, metavar="N", help="overrides the dataset's own output length")
    _add_lengths(group, {"--random-input-len": 1024, "--random-output-len": 128, "--random-prefix-len": 0})
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share (default: 0)"
    )
    prefix = "--prefix-repetition"
    _add_lengths(group, {f"{prefix}-prefix-len": 256, f"{prefix}-suffix-len": 256, f"{prefix}-num-prefixes": 10})
    _add_lengths(group, {f"{prefix}-output-len": 128, "--custom-output-len": 256})
    group.add_argument("--sharegpt-output-len", type=int, metavar="N", help="(default: that of the recorded answer)")


def _add_lengths(group: Any, flags: dict[str, int]) -> None:
    for flag, default in flags.items():
        unit = "" if flag.endswith("num-prefixes") else "tokens "
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{unit}(default: {default})")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: what the server does)")
    for flag, (kind, text) in SAMPLING.items():
        if flag not in ("--max-tokens", "--seed"):
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="ask for log-probabilities of N tokens at each position"
    )
    group.add_argument("--ignore-eos", action="store_true", help="always generate the full length (random: always on)")
    group.add_argument("--extra-body", type=json_object, metavar="JSON", default={}, help="more fields of each request")


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    names = ",".join(LATENCY_NAMES[:3])
    group.add_argument("--percentile-metrics", default=names, metavar="NAMES", help=f"(default: {names}; also e2el)")
    group.add_argument("--metric-percentiles", default="99", metavar="LIST", help="such as 50,90,99 (default: 99)")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", default=[], help="limits, such as ttft:200 tpot:50 e2el:5000"
    )
    group.add_argument(
        "--reset-prefix-cache", action="store_true", help="empty the server's prefix cache before each run"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--plot", metavar="FILE", help="draw latencies and throughput: .png, .svg, no suffix: both")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with figures of each request")
    group.add_argument("--append-result", action="store_true", help="append to the file, one JSON object a line")
    group.add_argument("--result-dir", metavar="DIR", help="(default: the current one)")
    group.add_argument("--result-filename", metavar="FILE", help="(default: from backend, rate, model and time)")
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", default=[], help="kept in the JSON file")
    group.add_argument("--label", help="begins the file's name (default: the backend)")
    group.add_argument(
        "--request-id-prefix", default="", metavar="TEXT", help="of X-Request-Id (default: none is sent)"
    )


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="(default: 1000)")
    group.add_argument("--n", type=int, default=1, metavar="N", help="sequences per prompt (default: 1)")
    _add_offline(group)
    add_dataset_flags(parser)
    add_engine_flags(parser)


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    _add_lengths(group, {"--input-len": 32, "--output-len": 128})
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at a time (default: 8)")
    group.add_argument("--n", type=int, default=1, metavar="N", help="sequences per prompt (default: 1)")
    group.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="(default: 10)")
    group.add_argument("--num-iters", type=int, default=30, metavar="N", help="(default: 30)")
    _add_offline(group)
    add_engine_flags(parser)
    parser.set_defaults(enable_prefix_caching=False)


def _add_offline(group: Any) -> None:
    group.add_argument("--output-json", metavar="FILE", help="write the figures to this file")
    group.add_argument("--disable-detokenize", action="store_true", help="do not turn the output into text")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


_KINDS = {
    "serve": (
        "measure a running server under load: latencies, throughput, a plot",
        "octavo_server.bench.serve:bench_serve",
        add_serve_bench_flags,
    ),
    "throughput": (
        "measure the engine without a server: how fast many prompts are done",
        "octavo_server.bench.throughput:bench_throughput",
        add_throughput_flags,
    ),
    "latency": (
        "measure the engine without a server: how long one batch takes",
        "octavo_server.bench.latency:bench_latency",
        add_latency_flags,
    ),
}


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part, float) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(_positive(part, int)) for part in text.split(","))


def _positive(text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or a list of such: 1,2,4")
    return value
