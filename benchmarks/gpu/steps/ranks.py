"""Two ranks of one model: their tokens beside those of one rank, and their speed, on two GPUs or on a CPU."""

from typing import Any

import torch
from gpu.dummy_models import SHAPES, generate, open_engine
from gpu.step import LeftOut, Step, parse_step, run_cases
from gpu.steps.speed import MODEL, SETTINGS, loads_of

TINY: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_model_len": 256}


def open_ranks(step: Step, name: str, ranks: int, settings: dict[str, Any]) -> Any:
    if step.is_gpu and torch.cuda.device_count() < 2:
        raise LeftOut(f"ranks need two GPUs, and here is {torch.cuda.device_count()}")
    more = {"device": step.device, "tensor_parallel_size": ranks, "num_threads": 2}
    return open_engine(name, step.work, **{**settings, **more})[0]


def tokens(step: Step) -> None:
    found = []
    for ranks in (1, 2):
        core = open_ranks(step, "tiny-llama", ranks, TINY)
        found.append(generate(core, [(3, 16), (40, 16), (100, 16)], SHAPES["tiny-llama"]["vocab_size"])[0])
        core.shutdown()
    equal = sum(one == two for one, two in zip(*found, strict=True))
    note = "" if equal == 3 else f"{found[1]}, want {found[0]}"
    step.check("tiny-llama on 2 ranks = 1", equal == 3, f"{equal} of 3", "outputs equal", note[:300])


def throughput(step: Step) -> None:
    for name in (MODEL[step.device], *(["Llama-3-8B"] if step.is_gpu else [])):
        for ranks in (1, 2):
            core, vocab = open_ranks(step, name, ranks, SETTINGS[step.device]), SHAPES[name]["vocab_size"]
            for title, sizes, _ in loads_of(name):
                generate(core, sizes[:1], vocab)
                outputs, took = generate(core, sizes, vocab, most_s=step.seconds_left() - 5)
                if core.has_work():
                    raise LeftOut(f"no time was left for {name} {title}, {ranks} ranks")
                step.figure(f"{name} {title}: {ranks} ranks", sum(map(len, outputs)) / took, "tok/s")
            core.shutdown()


if __name__ == "__main__":
    run_cases(parse_step("ranks"), {"tokens": tokens, "throughput": throughput}, case_s=170.0)
