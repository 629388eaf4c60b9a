"""Flags of `octavo bench serve`, with vLLM's names and defaults; --reset-prefix-cache and sweeps are additions.

`octavo --help` imports this module, so it imports nothing that takes long.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Literal

from octavo_engine.settings.arg_types import MAX_PORT
from octavo_engine.settings.declare import Declared, setting

from octavo_server.bench.samples import PrefixRepetitionOptions, RandomOptions
from octavo_server.cli.chat_flags import SamplingFlags
from octavo_server.cli.declared_flags import add_flags

#: Sampling parameters without a flag, as the benchmark itself sets these fields.
NO_SAMPLING = ("max_tokens", "seed", "stop")
FILE_DATASETS = ("sharegpt", "custom", "burstgpt")
DATASETS = ("random", "prefix_repetition", *FILE_DATASETS)
LATENCY_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def _above_zero(text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or a list of such numbers: 1,2,4")
    return value


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_above_zero(part, float) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(_above_zero(part, int)) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags(Declared):
    backend: Literal["openai", "vllm", "openai-chat"] = setting(
        "openai",
        "API that requests use; openai, vllm: completions.",
        group="server: The API key to send to the server is read from $OPENAI_API_KEY or $OCTAVO_API_KEY.",
    )
    base_url: str | None = setting(None, "URL of the server, without /v1.", metavar="URL", unset="http://HOST:PORT")
    host: str = setting("127.0.0.1", "Host of the measured server.", metavar=None)
    port: int = setting(8000, "Port of the measured server.", ge=0, le=MAX_PORT, metavar=None)
    endpoint: str | None = setting(None, "URL path of the requests.", metavar="PATH", unset="depends on --backend")
    model: str | None = setting(None, "Model to measure.", metavar="NAME", unset="the first that the server lists")
    served_model_name: str | None = setting(
        None, "Name of the model in requests.", metavar="NAME", unset="that of --model"
    )
    tokenizer: str | None = setting(
        None, "Model or folder with the tokenizer.", metavar="MODEL", unset="that of --model"
    )
    header: tuple[str, ...] = setting((), "HTTP headers to add to requests.", metavar="KEY=VALUE", nargs="*")
    tokenizer_mode: Literal["auto", "hf"] = setting("auto", "No effect; there is only one kind of tokenizer.")
    trust_remote_code: bool = setting(False, "No effect; loading a tokenizer never runs the model's code.")
    insecure: bool = setting(False, "Skip the check of the server's TLS certificate.")
    ready_check_timeout_sec: int = setting(0, "Seconds to wait until the server answers.")
    num_prompts: int = setting(
        1000,
        "Requests per run.",
        group="load: For a list of rates or concurrencies (1,2,4,8), the command runs once per entry (a sweep).",
        ge=1,
    )
    request_rate: tuple[float, ...] = setting(
        (math.inf,), "Requests to start per second; inf: all at once.", parse=_rates, metavar="X", unset="inf"
    )
    burstiness: float = setting(
        1.0, "Regularity of the arrival of requests; 1: a Poisson process; below 1: burstier; above 1: smoother."
    )
    max_concurrency: tuple[int | None, ...] = setting(
        (None,), "Largest number of concurrent requests.", parse=_counts, metavar="N", unset="no limit"
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = setting(
        None, "Growth of the request rate during the run.", unset="none, the rate is constant"
    )
    ramp_up_start_rps: float | None = setting(None, "Requests per second at the start of the ramp.")
    ramp_up_end_rps: float | None = setting(None, "Requests per second at the end of the ramp.")
    num_warmups: int = setting(0, "Number of requests before the measurement.")
    seed: int = setting(0, "Seed of prompts and start times.", parse=int, metavar=None)
    dataset_name: str = setting("random", f"Dataset: {', '.join(DATASETS)}.", group="dataset", metavar="NAME")
    dataset_path: str | None = setting(None, "File with the dataset, for datasets read from a file.", metavar="FILE")
    no_oversample: bool = setting(False, "Don't repeat prompts of a file with too few.")
    disable_shuffle: bool = setting(False, "Keep the order of the dataset custom's prompts.")
    skip_chat_template: bool = setting(
        False,
        "Send the prompts of the dataset custom to the completions API without the chat template.",
        flags=("--custom-skip-chat-template",),
    )
    input_len: int | None = setting(None, "Prompt length in tokens.", unset="the dataset's")
    output_len: int | None = setting(None, "Output length in tokens.", unset="the dataset's")
    custom_output_len: int = setting(256, "Output length in tokens.")
    sharegpt_output_len: int | None = setting(
        None, "Output length in tokens for the dataset sharegpt.", unset="the length of the recorded answer"
    )
    logprobs: int | None = setting(
        None,
        "Number of the likeliest tokens to return with log-probabilities at each position.",
        group="sampling",
    )
    ignore_eos: bool = setting(False, "Generate the full output length; always on for random prompts.")
    percentile_metrics: str = setting(
        ",".join(LATENCY_NAMES[:3]),
        f"Latencies to report, out of {','.join(LATENCY_NAMES)}.",
        group="measurement",
        metavar="NAMES",
    )
    metric_percentiles: str = setting(
        "99", "Percentiles to report of these latencies, such as 50,90,99.", metavar="LIST"
    )
    goodput: tuple[str, ...] = setting(
        (),
        "Latency limits in milliseconds that a request must meet to count as goodput, such as ttft:200 e2el:5000.",
        metavar="NAME:MS",
    )
    reset_prefix_cache: bool = setting(False, "Reset the server's prefix cache before each run.")
    disable_tqdm: bool = setting(False, "Omit the progress bar.")
    save_result: bool = setting(False, "Write the results to a JSON file.", group="results")
    save_detailed: bool = setting(False, "Also write each request's values to that file.")
    append_result: bool = setting(False, "Append the results to the file as one JSON object per line.")
    result_dir: str | None = setting(None, "Folder of the result file.", metavar="DIR", unset="the current folder")
    result_filename: str | None = setting(
        None, "Name of the result file.", metavar="FILE", unset="made of backend, rate, model and time"
    )
    metadata: tuple[str, ...] = setting((), "Fields to add to the results.", metavar="KEY=VALUE", nargs="*")
    label: str | None = setting(
        None, "First part of the default name of the result file.", metavar=None, unset="the backend"
    )
    request_id_prefix: str = setting(
        "", "Prefix of the value of each request's header X-Request-Id.", unset="the header is not sent"
    )


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, BenchFlags, RandomOptions, PrefixRepetitionOptions, negatable=False)
    add_flags(parser, SamplingFlags, but=NO_SAMPLING, negatable=False)
