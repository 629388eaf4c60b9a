"""Flags of `octavo bench`, with vLLM's names and defaults; --reset-prefix-cache and sweeps are additions."""

import argparse
import math
from typing import Any

from octavo_engine.settings.arg_types import json_object, port

from octavo_server.bench.names import DATASETS, LATENCY_NAMES
from octavo_server.cli.chat_flags import SAMPLING

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
    _add_dataset(parser)
    _add_sampling(parser)
    _add_measurement(parser)
    _add_results(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "server", "The API key to send to the server is read from $OPENAI_API_KEY or $OCTAVO_API_KEY."
    )
    group.add_argument(
        "--backend", choices=BACKENDS, default="openai", help="API that requests use. Default: openai (completions)."
    )
    group.add_argument("--base-url", metavar="URL", help="URL of the server, without /v1. Default: http://HOST:PORT.")
    group.add_argument("--host", default="127.0.0.1", help="Host of the measured server. Default: 127.0.0.1.")
    group.add_argument("--port", type=port, default=8000, help="Port of the measured server. Default: 8000.")
    group.add_argument("--endpoint", metavar="PATH", help="URL path of the requests. Default: depends on --backend.")
    group.add_argument("--model", metavar="NAME", help="Model to measure. Default: the first that the server lists.")
    group.add_argument("--served-model-name", metavar="NAME", help="Name of the model in requests. Default: --model.")
    group.add_argument("--tokenizer", metavar="MODEL", help="Model or folder with the tokenizer. Default: the model.")
    group.add_argument(
        "--header", nargs="*", metavar="KEY=VALUE", default=[], help="HTTP headers to add to requests. Default: none."
    )
    group.add_argument(
        "--tokenizer-mode",
        choices=("auto", "hf"),
        default="auto",
        help="No effect; there is only one kind of tokenizer. Default: auto.",
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="No effect; loading a tokenizer never runs the model's code."
    )
    group.add_argument("--insecure", action="store_true", help="Skip the check of the server's TLS certificate.")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=int,
        default=0,
        metavar="N",
        help="Seconds to wait until the server answers. Default: 0.",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "load", "A list of rates or concurrencies (1,2,4,8) makes one run each (a sweep)."
    )
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="Requests per run. Default: 1000.")
    group.add_argument(
        "--request-rate",
        type=_rates,
        default=(math.inf,),
        metavar="X",
        help="Requests to start per second; inf: all at once. Default: inf.",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="Regularity of request starts; 1: a Poisson process, below 1: burstier, above 1: smoother. Default: 1.",
    )
    group.add_argument(
        "--max-concurrency",
        type=_counts,
        default=(None,),
        metavar="N",
        help="Largest number of concurrent requests. Default: no limit.",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="Growth of the request rate during the run. Default: none, the rate is constant.",
    )
    group.add_argument(
        "--ramp-up-start-rps", type=float, metavar="X", help="Requests per second at the start of the ramp."
    )
    group.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="Requests per second at the end of the ramp.")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="Number of requests before the measurement. Default: 0."
    )
    group.add_argument("--seed", type=int, default=0, help="Seed of prompts and start times. Default: 0.")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", default="random", metavar="NAME", help=f"Dataset: {', '.join(DATASETS)}. Default: random."
    )
    group.add_argument("--dataset-path", metavar="FILE", help="File with the dataset, for datasets read from a file.")
    group.add_argument("--no-oversample", action="store_true", help="Don't repeat prompts of a file with too few.")
    group.add_argument("--disable-shuffle", action="store_true", help="Keep the order of the dataset custom's prompts.")
    group.add_argument(
        *("--skip-chat-template", "--custom-skip-chat-template"),
        dest="skip_chat_template",
        action="store_true",
        help="Send the prompts of the dataset custom to the completions API without the chat template.",
    )
    group.add_argument("--input-len", type=int, metavar="N", help="Prompt length in tokens. Default: the dataset's.")
    group.add_argument("--output-len", type=int, metavar="N", help="Output length in tokens. Default: the dataset's.")
    _add_lengths(group, {"--random-input-len": 1024, "--random-output-len": 128, "--random-prefix-len": 0})
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="Largest deviation of the dataset random's lengths, as a share of the mean length. Default: 0.",
    )
    prefix = "--prefix-repetition"
    _add_lengths(group, {f"{prefix}-prefix-len": 256, f"{prefix}-suffix-len": 256, f"{prefix}-num-prefixes": 10})
    _add_lengths(group, {f"{prefix}-output-len": 128, "--custom-output-len": 256})
    group.add_argument(
        "--sharegpt-output-len",
        type=int,
        metavar="N",
        help="Output length in tokens for the dataset sharegpt. Default: the length of the recorded answer.",
    )


def _add_lengths(group: Any, flags: dict[str, int]) -> None:
    for flag, default in flags.items():
        text = _length_text(flag)
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text}. Default: {default}.")


def _length_text(flag: str) -> str:
    if flag.endswith("num-prefixes"):
        return "Number of different prefixes of the dataset prefix_repetition"
    part = flag.removesuffix("-len").rpartition("-")[2]
    return f"{part.capitalize()} length in tokens"


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the server's settings)")
    for flag, (kind, text) in SAMPLING.items():
        if flag not in ("--max-tokens", "--seed"):
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="Number of the likeliest tokens to return with log-probabilities at each position. Default: none.",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="Generate the full output length; always on for random prompts."
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        metavar="JSON",
        default={},
        help="Fields to add to the body of each request, as a JSON object.",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    names = ",".join(LATENCY_NAMES[:3])
    group.add_argument(
        "--percentile-metrics",
        default=names,
        metavar="NAMES",
        help=f"Latencies to report, out of {','.join(LATENCY_NAMES)}. Default: {names}.",
    )
    group.add_argument(
        "--metric-percentiles",
        default="99",
        metavar="LIST",
        help="Percentiles to report of these latencies, such as 50,90,99. Default: 99.",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        default=[],
        help="Latency limits in milliseconds that a request must meet to count as goodput, such as ttft:200 e2el:5000.",
    )
    group.add_argument(
        "--reset-prefix-cache", action="store_true", help="Reset the server's prefix cache before each run."
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Omit the progress bar.")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--save-result", action="store_true", help="Write the results to a JSON file.")
    group.add_argument("--save-detailed", action="store_true", help="Also write each request's values to that file.")
    group.add_argument(
        "--append-result", action="store_true", help="Append the results to the file as one JSON object per line."
    )
    group.add_argument("--result-dir", metavar="DIR", help="Folder of the result file. Default: the current folder.")
    group.add_argument(
        "--result-filename",
        metavar="FILE",
        help="Name of the result file. Default: made of backend, rate, model and time.",
    )
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", default=[], help="Fields to add to the results.")
    group.add_argument("--label", help="First part of the default name of the result file. Default: the backend.")
    group.add_argument(
        "--request-id-prefix",
        default="",
        metavar="TEXT",
        help="Prefix of the value of each request's header X-Request-Id. Default: the header is not sent.",
    )


_KINDS = {
    "serve": (
        "measure a running server under load: latencies and throughput",
        "octavo_server.bench.serve:bench_serve",
        add_serve_bench_flags,
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
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or a list of such numbers: 1,2,4")
    return value
