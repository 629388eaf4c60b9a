"""transformers' `generate` on one static batch, in its own environment: transformers_static.py MODEL DTYPE THREADS."""

import sys

from worker import Generate, serve


def load() -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model_path, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        ids = torch.tensor(prompts)
        outputs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=2,
        )
        return [len(output) - ids.shape[1] for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
