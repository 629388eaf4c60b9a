"""`BenchOptions`: the flags of `octavo bench serve`, checked before the first request to the server, and the times at
which the requests start: a Poisson or (burstier or smoother) gamma process, a rising rate, or all at once.
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo_engine.wire.errors import StartupError

from octavo_server.bench.flags import GOODPUT_NAMES, LATENCY_NAMES, NO_SAMPLING
from octavo_server.bench.load import BenchTarget
from octavo_server.cli.chat_flags import key_of, sampling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """`rate`: requests per second. `burstiness` 1: a Poisson process; below 1: burstier; above 1: smoother."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None

    def offsets_s(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each request; if the rate is constant, scaled so that the last is count / rate."""
        if math.isinf(self.rate) and self.ramp_up is None:
            return [0.0] * count
        dice = random.Random(seed)
        offsets, now = [], 0.0
        for i in range(count):
            rate = self.rate if self.ramp_up is None else self.ramp_up.rate(i / max(count - 1, 1))
            now += dice.gammavariate(self.burstiness, 1 / (max(rate, 1e-3) * self.burstiness))
            offsets.append(now)
        return offsets if self.ramp_up is not None else _scaled(offsets, count / self.rate)


def _scaled(offsets: Sequence[float], end: float) -> list[float]:
    return [offset * end / offsets[-1] for offset in offsets] if offsets else []


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """One load to measure: a rate or a limit of concurrency."""

    arrivals: ArrivalProcess
    max_concurrency: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    base_url: str
    models_path: str
    key: str | None
    headers: dict[str, str]
    target: BenchTarget
    loads: tuple[LoadLevel, ...]
    latencies: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput_ms: dict[str, float]
    metadata: dict[str, str]


def parse_options(args: argparse.Namespace) -> BenchOptions:
    """Check and convert the arguments. Raises StartupError."""
    uses_chat = args.backend == "openai-chat"
    endpoint = args.endpoint or ("/v1/chat/completions" if uses_chat else "/v1/completions")
    if endpoint.endswith("/chat/completions") != uses_chat:
        raise StartupError(f"--backend {args.backend} does not match --endpoint {endpoint}: change one of the two.")
    return BenchOptions(
        base_url=(args.base_url or _address(args.host, args.port)).rstrip("/"),
        models_path=endpoint.removesuffix("/completions").removesuffix("/chat") + "/models",
        key=key_of(),
        headers=_pairs("--header", args.header),
        target=BenchTarget(
            path=endpoint,
            model=args.model or "",
            uses_chat=uses_chat,
            ignore_eos=args.ignore_eos or args.dataset_name == "random",
            extra_body=_logprobs(args.logprobs, uses_chat=uses_chat) | sampling_of(args, but=NO_SAMPLING),
            request_id_prefix=args.request_id_prefix,
        ),
        loads=_loads(args),
        latencies=_latencies(args.percentile_metrics),
        percentiles=_percentiles(args.metric_percentiles),
        goodput_ms=_goodput(args.goodput),
        metadata=_pairs("--metadata", args.metadata),
    )


def _logprobs(count: int | None, *, uses_chat: bool) -> dict[str, int | bool]:
    if count is None:
        return {}
    return {"logprobs": True, "top_logprobs": count} if uses_chat else {"logprobs": count}


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _pairs(flag: str, items: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise StartupError(f"{flag} {item!r}: write KEY=VALUE.")
        pairs[key.strip()] = value.strip()
    return pairs


def _loads(args: argparse.Namespace) -> tuple[LoadLevel, ...]:
    rates, limits = args.request_rate, args.max_concurrency
    if len(rates) > 1 and len(limits) > 1:
        raise StartupError(
            "a sweep varies the rate or the concurrency: give a list only to --request-rate or --max-concurrency."
        )
    if args.burstiness <= 0:
        raise StartupError(f"--burstiness is {args.burstiness}: give a number above 0.")
    ramp_up = _ramp_up(args)
    return tuple(
        LoadLevel(
            arrivals=ArrivalProcess(rate=rate, burstiness=args.burstiness, ramp_up=ramp_up), max_concurrency=limit
        )
        for rate in rates
        for limit in limits
    )


def _ramp_up(args: argparse.Namespace) -> RampUp | None:
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        return None
    if tuple(args.request_rate) != (math.inf,):
        raise StartupError("--ramp-up-strategy sets the rate: leave out --request-rate.")
    if start is None or end is None or not 0 <= start <= end or end <= 0:
        raise StartupError(
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, the end not below the start."
        )
    if args.ramp_up_strategy == "exponential" and start == 0:
        raise StartupError("an exponential ramp can't start at 0: raise --ramp-up-start-rps.")
    return RampUp(strategy=args.ramp_up_strategy, start_rps=start, end_rps=end)


def _latencies(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in LATENCY_NAMES:
            raise StartupError(f"--percentile-metrics contains {name!r}: use only {', '.join(LATENCY_NAMES)}.")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(float(part) for part in text.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= value <= 100 for value in percentiles):
        raise StartupError(f"--metric-percentiles {text!r}: write numbers from 0 to 100, such as 50,90,99.")
    return percentiles


def _goodput(items: Sequence[str]) -> dict[str, float]:
    limits = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT_NAMES or not limits[name] >= 0:
            raise StartupError(f"--goodput {item!r}: write NAME:MS with one of {', '.join(GOODPUT_NAMES)}.")
    return limits
