"""lm-eval: log-likelihoods of continuations equal those of transformers; generation until a stop string."""

import json
import os
import subprocess
import sys

from asked import REAL_MODEL, REAL_URL, Row, expect
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a large city in the south of Germany"),
    ("1, 1, 2, 3, 5, 8,", " 13, 21, 34"),
    ("Il fait très froid à", " Kraków"),
    ("def fibonacci(n):\n    if n < 2:\n", "        return n\n"),
)
row = Row("lm-eval, completions")


def new_model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model=REAL_MODEL,
        base_url=f"{REAL_URL}/v1/completions",
        tokenizer_backend="remote",
        tokenized_requests=True,
        max_retries=1,
    )


try:
    model = new_model()
except RuntimeError:
    note = "It reads `/tokenizer_info`, which routers do not serve: name a replica, or use a tokenizer of your own."
    row.lacks("chat", note, new_model, RuntimeError)
    sys.exit()
requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
encoded = [model._encode_pair(*pair) for pair in PAIRS]
asked = [(context + continuation, len(continuation)) for context, continuation in encoded]
oracle = subprocess.run(
    os.environ["ORACLE"].split(), input=json.dumps(asked), capture_output=True, text=True, check=True
)
with row.shows("chat"):
    for pair, (got, is_greedy), (wanted, is_wanted_greedy) in zip(
        PAIRS, model.loglikelihood(requests), json.loads(oracle.stdout), strict=True
    ):
        expect(f"log-likelihood of {pair}: {got} and transformers' {wanted} differ", abs(got - wanted) < 0.01, True)
        expect(f"greedy choice of {pair}", is_greedy, is_wanted_greedy)
    until = Instance("generate_until", {}, ("The capital of France is", {"until": ["."], "max_gen_toks": 20}), 0)
    expect("text before the stop string", "." in model.generate_until([until])[0], False)
