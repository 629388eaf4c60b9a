"""The same requests of many kinds to an `LLM` of one rank and of several, whose answers are then compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo_engine import LLM, LoRARequest, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at one hundred degrees Celsius, and",
    "Dear Sir or Madam, I am writing to complain about",
    "The quick brown fox jumps over the lazy",
    "Q: What is the largest planet of the solar system?\nA:",
]
Answers = dict[str, Any]


@contextmanager
def started_stages(model: str, num_stages: int, size: int = 1, **arguments: Any) -> Iterator[LLM]:
    """Start stages of so many ranks, each of which has a thread."""
    arguments |= {"pipeline_parallel_size": num_stages, "num_threads": num_stages * size}
    with started(model, size, **arguments) as llm:
        yield llm


@contextmanager
def started(model: str, size: int, **arguments: Any) -> Iterator[LLM]:
    common = {"dtype": "float32", "num_threads": size, "debug_invariants": True, "num_gpu_blocks_override": 64}
    llm = LLM(model, tensor_parallel_size=size, **(common | arguments))
    try:
        yield llm
    finally:
        llm.shutdown()


def adapted_answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    """Return the tokens of one greedy request for each adapter; None: without one."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = llm.generate(TEXTS[: len(adapters)], params, use_tqdm=False, lora_request=adapters)
    return [list(each.outputs[0].token_ids) for each in outputs]


def answers(llm: LLM, texts: list[str], num_tokens: int, *, digits: int = 2) -> Answers:
    """Return the tokens of requests of many kinds, and log-probabilities rounded to what several ranks may change.

    `digits`: after the point; stages change none.
    """

    def tokens(prompts: list[str], **fields: Any) -> list[list[int]]:
        params = SamplingParams(**{"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True} | fields)
        return [list(o.token_ids) for each in llm.generate(prompts, params, use_tqdm=False) for o in each.outputs]

    schema = SamplingParams(
        temperature=0.7, seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    scored = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, logprobs=2)
    (scored_output,) = llm.generate(texts[:1], scored, use_tqdm=False)
    return {
        "greedy": tokens(texts),
        "cached": tokens(texts),
        "seeded": tokens(texts, temperature=0.8, top_p=0.9, seed=7),
        "four": tokens(texts[:1], n=4, temperature=1.0, seed=3),
        "penalties": tokens(texts, repetition_penalty=1.3, min_tokens=3),
        "json": [o.outputs[0].text for o in llm.generate(texts[:2], schema, use_tqdm=False)],
        "prompt_logprobs": [
            None if row is None else {token: round(each.logprob, digits) for token, each in row.items()}
            for row in scored_output.prompt_logprobs
        ],
    }
