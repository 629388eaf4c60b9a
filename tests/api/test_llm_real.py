"""`LLM` with the real SmolLM2: sensible text, and greedy fp32 tokens that do not depend on other requests or memory.

Each way of running the eight fixed prompts must give the same tokens as running each prompt alone, and its counters
must show that its case has occurred. If two logits are within 1e-3 of each other, the order of sums may decide; the
prompts are chosen without such ties, and a failure prints the first difference.
"""

import pytest
from octavo_engine import LLM, SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SHARED = "You are a helpful assistant. Answer in one sentence, politely, and stay with the facts that you know. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    SHARED + "What is the largest planet?",
    SHARED + "Who wrote Hamlet?",
    "1, 2, 3, 4, 5,",
    "Water boils at a temperature of",
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CROWD = 32


def make_llm(**arguments):
    blocks = {"max_model_len": 128, "num_gpu_blocks_override": 512} | arguments
    return LLM(dtype="float32", debug_invariants=True, **blocks)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm():
    llm = make_llm()
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(llm):
    """The reference: one request at a time, without cache."""
    fresh = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, skip_reading_prefix_cache=True)
    return [tokens(llm.generate(prompt, fresh, use_tqdm=False))[0] for prompt in PROMPTS]


def test_greedy_text_is_sensible(llm, alone):
    assert "Paris" in llm.get_tokenizer().decode(alone[0])


def test_chat_names_the_capital_of_france(llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_cached_prompts_give_the_same_tokens(llm, alone):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert tokens(outputs) == alone


def test_a_batch_gives_the_same_tokens(llm, alone):
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(CROWD)], GREEDY, use_tqdm=False)
    assert tokens(outputs) == [alone[i % len(PROMPTS)] for i in range(CROWD)]


def test_chunked_prompts_give_the_same_tokens(alone):
    llm = make_llm(max_num_batched_tokens=12, max_num_seqs=8, enable_prefix_caching=False)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    assert llm.stats.steps > 24 + sum(len(prompt.split()) for prompt in PROMPTS) // 12


@pytest.mark.parametrize(
    ("mode", "swap_space", "happened"),
    [
        ("swap", 0.01, ("preemptions_swap", "swapped_out_blocks", "swapped_in_blocks")),
        ("recompute", 0.0, ("preemptions_recompute", "recomputed_tokens")),
    ],
)
def test_preempted_sequences_give_the_same_tokens(alone, mode, swap_space, happened):
    llm = make_llm(num_gpu_blocks_override=10, max_model_len=96, preemption_mode=mode, swap_space=swap_space)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    counters = {name: getattr(llm.stats, name) for name in happened}
    assert all(counters.values()), counters
    assert llm.stats.in_use_blocks == 0


def test_forks_of_a_shared_prompt_sample_as_single_requests(llm):
    """The n outputs share the prompt's blocks and copy on write; each equals a request with its own seed."""
    sampled = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    copies = llm.stats.cow_copies
    (together,) = llm.generate(PROMPTS[1], SamplingParams(n=3, seed=7, **sampled), use_tqdm=False)
    assert llm.stats.cow_copies > copies
    single = [llm.generate(PROMPTS[1], SamplingParams(seed=7 + i, **sampled), use_tqdm=False)[0] for i in range(3)]
    assert [c.token_ids for c in together.outputs] == tokens(single)
