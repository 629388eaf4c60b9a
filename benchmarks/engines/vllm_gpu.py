"""vLLM with dummy weights, in its own environment: vllm_gpu.py MODEL PLANS. Prints a JSON list (plan, tokens/s) a line.

PLANS: a JSON list of (plan, list of (prompt tokens, output tokens)), as phase 3 of `gpu.sh` runs them.
"""

import json
import random
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    model, plans = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=256,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    draw = random.Random(0)
    for title, sizes in plans:
        prompts = [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(num_in)]} for num_in, _ in sizes]
        params = [
            SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False) for _, num_out in sizes
        ]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([title, sum(num_out for _, num_out in sizes) / (time.perf_counter() - began)]), flush=True)


if __name__ == "__main__":
    main()
