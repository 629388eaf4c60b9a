"""Tokens of tiny random models: on the GPU as on the CPU, with each feature that changes steps, beside transformers.

The public class `LLM` runs them. Without a GPU, Triton's interpreter computes what the GPU would. Modules of the engine
are imported by the cases, so that one that can't be imported costs those that need it.
"""

import gc
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import octavo_engine as octavo
import torch
from gpu.step import Case, Step, parse_step, run_cases

NEAR = 2e-3  # a difference of two log-probabilities below which devices may choose differently
SEEDED = {"temperature": 0.9, "top_p": 0.9}
SHAPED = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {40: 2.0}, "bad_words": ["e"]}
PROPERTIES = {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["a", "b"], "additionalProperties": False}

Prompts = list[dict[str, list[int]]]
Outputs = list["octavo.CompletionOutput"]


class Tiny:
    """A tiny model, its prompts and its engines on the step's device; `check_*` are the cases."""

    def __init__(self, model: str, step: Step) -> None:
        self.model, self.step, self.is_gpu = model, step, step.is_gpu
        self.num_prompts, self.num_tokens, self.longest = (24, 16, 50) if step.is_gpu else (2, 3, 12)
        self.settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 72,
            "max_num_seqs": 16 if step.is_gpu else 4,
            "max_num_batched_tokens": 128 if step.is_gpu else 40,
            "num_gpu_blocks_override": 160,
            "seed": 1,
            "num_threads": 2 if step.is_gpu else 1,  # workers run beside each other, and OpenMP's threads spin
        }

    @cached_property
    def folder(self) -> Path:
        from octavo_testing.tiny_models import make_tiny

        parent = self.step.work / "models" / str(os.getpid())  # two workers must not write one file
        parent.mkdir(parents=True, exist_ok=True)
        return make_tiny(self.model, parent)

    @contextmanager
    def engine(self, *, on_cpu: bool = False, **settings: Any) -> Iterator["octavo.LLM"]:
        """Run an engine on the device under test, or with `on_cpu`, by torch alone on the CPU, as the reference."""
        device = "cuda" if self.is_gpu and not on_cpu else "cpu"
        with nullcontext() if self.is_gpu or on_cpu else interpreted_kernels():
            llm = octavo.LLM(str(self.folder), **{**self.settings, **settings, "device": device})
            try:
                yield llm
            finally:
                llm.shutdown()

    def run(self, params: Any, prompts: Prompts | None = None, **settings: Any) -> Outputs:
        with self.engine(**settings) as llm:
            return self.complete(llm, params, prompts)

    def complete(self, llm: "octavo.LLM", params: Any, prompts: Prompts | None = None, **more: Any) -> Outputs:
        found = llm.generate(prompts or self.prompts(), params, use_tqdm=False, **more)
        return [output for each in found for output in each.outputs]

    def prompts(self, count: int | None = None) -> Prompts:
        draw = random.Random(5)
        lengths = [draw.randint(2, self.longest) for _ in range(count or self.num_prompts)]
        return [{"prompt_token_ids": [draw.randrange(3, 259) for _ in range(length)]} for length in lengths]

    def greedy(self, **more: Any) -> "octavo.SamplingParams":
        return octavo.SamplingParams(**{"temperature": 0.0, "max_tokens": self.num_tokens, "ignore_eos": True, **more})

    def check(self, name: str, passed: bool, value: Any = None, unit: str = "", note: str = "") -> None:
        self.step.check(f"{self.model}: {name}", passed, value, unit, note)

    def compare(self, name: str, found: Outputs, wanted: Outputs) -> None:
        """Report whether tokens are equal, up to a place where the log-probabilities of the two hardly differ."""
        gaps = [first_gap(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
        wrong = [f"output {i}, {gap[1]}" for i, gap in enumerate(gaps) if gap is not None and gap[0] >= NEAR]
        ties = sum(gap is not None for gap in gaps) - len(wrong)
        note = "; ".join(wrong[:3]) + (f" {ties} near ties" if ties else "")
        self.check(name, not wrong, f"{len(found) - len(wrong)} of {len(found)}", "outputs equal", note)


def interpreted_kernels() -> AbstractContextManager[None]:
    from octavo_testing.triton_device import triton_kernels

    return triton_kernels()


def first_gap(found: Any, wanted: Any) -> tuple[float, str] | None:
    """Return how far the log-probabilities of the first two tokens that differ are apart, with a text; None: equal."""
    ours, theirs = list(found.token_ids), list(wanted.token_ids)
    if ours == theirs and ours:  # a request that failed has no tokens
        return None
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    gap = float("inf")
    if wanted.logprobs and at < shorter and ours[at] in wanted.logprobs[at]:
        gap = abs(wanted.logprobs[at][theirs[at]].logprob - wanted.logprobs[at][ours[at]].logprob)
    return gap, f"token {at} ({found.finish_reason}): {ours[at : at + 4]}, want {theirs[at : at + 4]}, apart {gap:.2g}"


def check_tokens(tiny: Tiny) -> None:
    """Compare greedy, drawn, shaped and forked outputs with the CPU's, and eager and other steps with these."""
    draws = [tiny.greedy(**SEEDED, seed=i, top_k=20 * (i % 2), logprobs=5) for i in range(tiny.num_prompts)]
    kinds: dict[str, Any] = {"greedy": tiny.greedy(logprobs=5), "seeded": draws}
    kinds["penalties, bias, bad words"] = tiny.greedy(**SHAPED, min_tokens=3, logprobs=5)
    kinds["three forks of a prompt"] = tiny.greedy(**SEEDED, n=3, seed=7, logprobs=5)
    given = {"three forks of a prompt": tiny.prompts(min(tiny.num_prompts, 4))}
    with tiny.engine(on_cpu=True) as llm:
        wanted = {kind: tiny.complete(llm, params, given.get(kind)) for kind, params in kinds.items()}
    began = time.perf_counter()
    with tiny.engine() as llm:
        took, ready = time.perf_counter() - began, llm.ready_info
        tiny.step.figure(f"{tiny.model}: start of an engine", took, "s", str(ready.startup_s))
        found = {kind: tiny.complete(llm, params, given.get(kind)) for kind, params in kinds.items()}
        without, copies = tiny.complete(llm, tiny.greedy()), llm.stats.cow_copies
    for kind, outputs in found.items():
        tiny.compare(f"{kind} = CPU", outputs, wanted[kind])
    tiny.compare("without log-probabilities = CPU", without, wanted["greedy"])
    tiny.check("blocks that forks copy", copies > 0, copies)
    worst = max(map(largest_gap, found["greedy"], wanted["greedy"]))
    tiny.check("log-probabilities beside the CPU's", worst < 1e-3, worst, "largest difference")
    for title, more in (("eager", {"enforce_eager": True}), ("not ahead", {"async_scheduling": not tiny.is_gpu})):
        tiny.compare(f"{title} = default", tiny.run(tiny.greedy(), **more), found["greedy"])


def largest_gap(found: Any, wanted: Any) -> float:
    """Return the largest difference of the tokens' log-probabilities, up to the first token that differs."""
    steps = zip(found.token_ids, wanted.token_ids, found.logprobs, wanted.logprobs, strict=False)
    equal = takewhile(lambda step: step[0] == step[1], steps)
    return max((abs(ours[token].logprob - theirs[token].logprob) for token, _, ours, theirs in equal), default=0.0)


def check_feature(tiny: Tiny, name: str) -> None:
    """Compare outputs with and without a feature that changes steps but no token; a counter shows that it ran."""
    part = [11, 12, 13, 14, 15, 16]
    shared = [7 + i % 90 for i in range(40 if tiny.is_gpu else 17)]
    given = {
        "prefixes": 2 * [[*shared, *range(100 + i, 104 + i)] for i in range(tiny.num_prompts)],
        "drafts": [(part[i % 6 :] + part) * 2 for i in range(tiny.num_prompts)],
    }
    some = tiny.prompts() if tiny.is_gpu else [{"prompt_token_ids": [*range(10 + i, 24 + i)]} for i in range(3)]
    prompts = [{"prompt_token_ids": ids} for ids in given[name]] if name in given else some
    few = {"num_gpu_blocks_override": 14 if tiny.is_gpu else 3, "max_model_len": 72 if tiny.is_gpu else 40}
    drafts = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    settings, counter = {
        "recompute": ({**few, "preemption_mode": "recompute"}, "preemptions_recompute"),
        "swap": ({**few, "preemption_mode": "swap", "swap_space": 0.01}, "swapped_in_blocks"),
        "prefixes": ({"enable_prefix_caching": True}, "prefix_cache_hits"),
        "drafts": ({"speculative_config": {"method": "ngram", **drafts}}, "draft_tokens"),
    }[name]
    more: dict[str, Any] = {} if tiny.is_gpu else {"max_tokens": 4}  # so that outputs need a second block
    if name == "drafts" and not tiny.is_gpu:
        more["logit_bias"] = dict.fromkeys(part, 30.0)  # so few tokens would repeat no n-gram
    plain = {"enable_prefix_caching": False}
    wanted = tiny.run(tiny.greedy(**more, logprobs=5), prompts, **plain)
    with tiny.engine(**{**plain, **settings}) as llm:
        tiny.compare(f"{name} = without", tiny.complete(llm, tiny.greedy(**more), prompts), wanted)
        tiny.check(f"{name}: {counter}", getattr(llm.stats, counter) > 0, getattr(llm.stats, counter))


def check_adapters(tiny: Tiny) -> None:
    from lora import write_adapter

    paths = [tiny.folder.parent / f"adapter-{time.time_ns()}-{i}" for i in range(2)]
    for i, path in enumerate(paths):
        write_adapter(path, str(tiny.folder), rank=8, seed=i, scale=0.2)
    requests = [None, *(octavo.LoRARequest(path.name, 1, str(path)) for path in paths)]
    prompts, found = tiny.prompts(tiny.num_prompts + 1), []
    for on_cpu in (True, False):
        with tiny.engine(on_cpu=on_cpu, enable_lora=True) as llm:
            chosen = [requests[i % 3] for i in range(len(prompts))]
            found.append(tiny.complete(llm, tiny.greedy(logprobs=5), prompts, lora_request=chosen))
            plain = tiny.complete(llm, tiny.greedy(), prompts)
    tiny.compare("two adapters in a batch = CPU", found[1], found[0])
    changed = sum(list(ours.token_ids) != list(base.token_ids) for ours, base in zip(found[1], plain, strict=True))
    tiny.check("outputs that adapters change", changed > 0, changed)


def check_second_engine(tiny: Tiny) -> None:
    """Run two engines in this process, in turn, and measure what they leave on the GPU."""
    found, left = [], 0.0
    for _ in range(2):
        found.append(tiny.run(tiny.greedy(logprobs=5)))
        gc.collect()
        left = max(left, memory_mib(tiny.step, "allocated"))
    tiny.compare("a second engine in the process = the first", found[1], found[0])
    tiny.check("tensors left after shutdown", left < 64, left, "MiB", "a workspace of cuBLAS has 32 MiB")


def check_sleep(tiny: Tiny) -> None:
    with tiny.engine(enable_sleep_mode=True, num_gpu_blocks_override=4000 if tiny.is_gpu else 160) as llm:
        wanted = tiny.complete(llm, tiny.greedy(logprobs=5))
        for level in (1, 2, 1):
            awake = memory_mib(tiny.step, "reserved")
            llm.sleep(level)
            freed, began = awake - memory_mib(tiny.step, "reserved"), time.perf_counter()
            llm.wake_up()
            woke = time.perf_counter() - began
            tiny.compare(f"after sleep of level {level} = before", tiny.complete(llm, tiny.greedy()), wanted)
            more = memory_mib(tiny.step, "reserved") - awake
            note = f"woke in {woke:.2f} s, {more:.0f} MiB more than before"
            tiny.check(f"memory that level {level} frees", freed > 10 or not tiny.is_gpu, freed, "MiB", note)


def memory_mib(step: Step, kind: str) -> float:
    """Return the GPU's memory that tensors of this process have ("allocated"), or torch ("reserved"); 0 on a CPU."""
    return float(getattr(torch.cuda, f"memory_{kind}")()) / 2**20 if step.is_gpu else 0.0


def check_schema(tiny: Tiny) -> None:
    shape = octavo.StructuredOutputs(json=SCHEMA)
    params = octavo.SamplingParams(temperature=1.0, seed=4, max_tokens=40, structured_outputs=shape)
    found = tiny.run(params, prompts := tiny.prompts(4 if tiny.is_gpu else 1))
    whole = [out.text for out in found if out.finish_reason != "length"]  # blanks may use up all tokens of others
    good = all(json.loads(text).keys() == {"a", "b"} for text in whole)
    tiny.check("outputs that obey a JSON schema", good, f"{len(whole)} of {len(found)}", "whole", repr(found[0].text))
    tiny.compare("JSON schema = CPU", found, tiny.run(params, prompts, on_cpu=True))


def check_prompts(tiny: Tiny) -> None:
    """Compare log-probabilities with transformers' in bf16: ours are at most twice as far from fp32 as theirs."""
    from transformers import AutoModelForCausalLM

    dtype = "bfloat16" if tiny.is_gpu else "float32"  # the interpreter computes bf16 wrongly
    prompts, values = tiny.prompts(8 if tiny.is_gpu else 2), []
    for kind in (torch.float32, getattr(torch, dtype)):
        peer = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager", dtype=kind)
        peer, rows = peer.to(tiny.step.device).eval(), []
        for each in prompts:
            ids = torch.tensor([each["prompt_token_ids"]], device=peer.device)
            with torch.inference_mode():
                logprobs = peer(ids).logits[0, :-1].float().log_softmax(-1)
            rows.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu())
        values.append(torch.cat(rows))
    with tiny.engine(dtype=dtype) as llm:
        outputs = llm.generate(prompts, tiny.greedy(prompt_logprobs=1), use_tqdm=False)
    tokens = [
        logprobs[token].logprob
        for output in outputs
        for token, logprobs in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:], strict=True)
    ]
    theirs, ours = ((each - values[0]).abs() for each in (values[1], torch.tensor(tokens)))
    note = f"mean distance from fp32: ours {ours.mean():.5f}, transformers' {theirs.mean():.5f}; most {ours.max():.4f}"
    tiny.check(f"log-probabilities of prompts, {dtype}", bool(ours.mean() <= 2 * theirs.mean() + 1e-4), note=note)


def cases_of(step: Step) -> Mapping[str, Case]:
    """Return the cases in the order of their worth."""
    models = ("llama", "qwen3", "gemma2", "qwen3_moe", "gpt_neox") if step.is_gpu else ("llama", "gemma2")
    features = {name: partial(check_feature, name=name) for name in ("recompute", "swap", "drafts", "prefixes")}
    more = {"sleep": check_sleep, "adapters": check_adapters, "schema": check_schema}
    more["two engines"] = check_second_engine
    plan: dict[str, tuple[Callable[[Tiny], None], str]] = {f"tokens {model}": (check_tokens, model) for model in models}
    plan |= {name: (check, "llama") for name, check in (features | more).items()}
    plan |= {f"transformers {model}": (check_prompts, model) for model in (models[:3] if step.is_gpu else models[:1])}
    plan |= {f"tokens {model}": (check_tokens, model) for model in ("phi3", "gpt2", "gemma3", "mixtral") if step.is_gpu}
    return {name: partial(_run, check, model) for name, (check, model) in plan.items()}


def _run(check: Callable[[Tiny], None], model: str, step: Step) -> None:
    check(Tiny(model, step))


if __name__ == "__main__":
    this = parse_step("tokens")
    run_cases(this, cases_of(this), workers=6 if this.is_gpu else 2, case_s=100.0 if this.is_gpu else 250.0)
