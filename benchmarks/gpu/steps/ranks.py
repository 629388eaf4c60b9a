"""Two ranks of one model: their tokens beside those of one rank, and their speed, on two GPUs or on a CPU."""

from typing import Any

import torch
from gpu import dummy_models
from gpu.step import Step, parse_step, run_cases
from gpu.steps.speed import MODEL, SETTINGS, generate, loads_of

TINY: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 100, "max_model_len": 256}
LENGTHS = (3, 40, 100)  # of prompts


def has_gpus(step: Step) -> bool:
    """Return whether each rank has a GPU; report that the case is left out if not."""
    if not step.is_gpu or torch.cuda.device_count() > 1:
        return True
    step.figure("left out, as it needs two GPUs; GPUs", torch.cuda.device_count())
    return False


def tokens(step: Step) -> None:
    if not has_gpus(step):
        return
    found = []
    for ranks in (1, 2):
        more = {"device": step.device, "tensor_parallel_size": ranks, "num_threads": 2}
        core, _ = dummy_models.open_engine("tiny-llama", step.work, **TINY, **more)
        found.append(
            dummy_models.generate(
                core, [(length, 16) for length in LENGTHS], dummy_models.SHAPES["tiny-llama"]["vocab_size"]
            )[0]
        )
        core.shutdown()
    equal = sum(one == two for one, two in zip(*found, strict=True))
    note = "" if equal == len(LENGTHS) else f"{found[1]}, want {found[0]}"
    step.check(
        "tiny-llama on 2 ranks = 1", equal == len(LENGTHS), f"{equal} of {len(LENGTHS)}", "outputs equal", note[:300]
    )


def throughput(step: Step) -> None:
    for name in (MODEL[step.device], *(["Llama-3-8B"] if step.is_gpu else [])) if has_gpus(step) else ():
        for ranks in (1, 2):
            more = {"device": step.device, "tensor_parallel_size": ranks, "num_threads": 2}
            core, _ = dummy_models.open_engine(name, step.work, **{**SETTINGS[step.device], **more})
            for title, sizes, _ in loads_of(name):
                if step.seconds_left() < 10:
                    raise TimeoutError(f"{name} {title}, {ranks} ranks: no time was left")
                generate(core, sizes[:1], dummy_models.SHAPES[name]["vocab_size"], step.seconds_left() - 5)
                count, took, _ = generate(core, sizes, dummy_models.SHAPES[name]["vocab_size"], step.seconds_left() - 5)
                step.figure(f"{name} {title}: {ranks} ranks", count / took, "tok/s")
            core.shutdown()


if __name__ == "__main__":
    run_cases(parse_step("ranks"), {"tokens": tokens, "throughput": throughput}, case_s=170.0)
