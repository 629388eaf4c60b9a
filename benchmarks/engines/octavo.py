"""Octavo itself, through its public `LLM`: octavo.py MODEL MAX_MODEL_LEN MAX_NUM_SEQS DTYPE [--no-prefix-caching].

It reports the seconds of each call, the CPU seconds of its process tree and the number of steps of the engine core.
"""

import argparse
import os

import psutil
from octavo_engine import LLM, SamplingParams
from worker import Generate, serve

KV_CACHE_BYTES = 3 << 30


class Octavo:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._llm: LLM | None = None

    def load(self) -> Generate:
        arguments = self._arguments
        llm = self._llm = LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=2048,
            enable_prefix_caching=arguments.prefix_caching,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )

        def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        return generate

    def counters(self) -> dict[str, float]:
        me = psutil.Process(os.getpid())
        times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        cpu_s = sum(time.user + time.system for time in times)
        return {"cpu_s": cpu_s, **self._engine_counters()}

    def _engine_counters(self) -> dict[str, float]:
        assert self._llm
        stats = self._llm.stats
        return {"steps": stats.steps, "prefix_cache_hits": stats.prefix_cache_hits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("max_model_len", type=int)
    parser.add_argument("max_num_seqs", type=int)
    parser.add_argument("dtype")
    parser.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    octavo = Octavo(parser.parse_args())
    serve(octavo.load, octavo.counters)


if __name__ == "__main__":
    main()
