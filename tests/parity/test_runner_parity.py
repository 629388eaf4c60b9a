"""Hand-written plans run by the real runner on tiny models, against transformers: tokens and logprobs.

They cover whole and chunked prefill, shared blocks, forks with copy-on-write, swap out and in, beside other sequences.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from octavo_engine.runner.executor import Executor
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.plan import NewSeq, SeqResult, SeqStep, StepPlan, StepResult
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.tiny_models import VOCAB, make_tiny, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

BLOCK = 4
PROMPT = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
NEW_TOKENS = 12
TOLERANCE = 1e-4


@dataclass
class Rig:
    """Allocates blocks in scattered order; each sequence requests all log-probabilities of each token."""

    executor: Executor
    info: ReadyInfo
    model: PreTrainedModel
    free: list[int] = field(default_factory=list)
    steps: int = 0

    def blocks(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def run(self, *steps: SeqStep, **plan: object) -> dict[int, SeqResult]:
        self.steps += 1
        result: StepResult = self.executor.submit(
            StepPlan(step_id=self.steps, seqs=list(steps), **plan)  # type: ignore[arg-type]
        ).result()
        assert result.error is None, result.error
        return {seq.seq_id: seq for seq in result.seqs}

    def expect(self, prompt: list[int], got: list[SeqResult]) -> None:
        """Assert that the greedy tokens and all log-probabilities equal transformers', position by position."""
        tokens = list(prompt)
        for result in got:
            want = self.oracle(tokens)
            (entry,) = result.logprobs or []
            row = torch.empty(VOCAB)
            row[entry.token_ids[1:]] = torch.tensor(entry.logprobs[1:])
            torch.testing.assert_close(row, want, atol=TOLERANCE, rtol=0)
            assert result.token_ids == [int(want.argmax())]
            tokens += result.token_ids

    def oracle(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([tokens])).logits
        return logits[0, -1].log_softmax(-1)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return open_rig(request.param, tmp_path_factory.mktemp("models"))


def open_rig(name: str, folder: Path) -> Rig:
    config = EngineConfig(
        model=str(make_tiny(name, folder)),
        dtype="float32",
        block_size=BLOCK,
        num_gpu_blocks_override=100,
        swap_space=0.001,
        max_num_seqs=8,
        num_threads=1,
    )
    executor, info = load(config)
    return Rig(executor, info, tiny_model(name))


@pytest.fixture
def rig(loaded: Rig) -> Rig:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()
    return Rig(loaded.executor, loaded.info, loaded.model, free=order)


def new(seq_id: int, prompt: list[int]) -> NewSeq:
    params = SamplingParams(temperature=0.0, logprobs=-1, max_tokens=99)
    return NewSeq(seq_id=seq_id, token_ids=prompt, num_prompt_tokens=len(prompt), params=params)


def step(seq_id: int, start: int, num_tokens: int, blocks: list[int] | None = None, table_start: int = 0) -> SeqStep:
    table = [] if blocks is None else [blocks]
    return SeqStep(
        seq_id=seq_id, start=start, num_tokens=num_tokens, sample=True, table_start=table_start, block_ids=table
    )


def prefill(seq_id: int, prompt: list[int], rig: Rig) -> SeqStep:
    return step(seq_id, 0, len(prompt), rig.blocks(-(-(len(prompt) + NEW_TOKENS) // BLOCK)))


def decode(rig: Rig, lengths: dict[int, int], count: int = NEW_TOKENS - 1) -> dict[int, list[SeqResult]]:
    """`lengths`: number of tokens of each sequence; the KV of its last token is computed now."""
    found: dict[int, list[SeqResult]] = {seq_id: [] for seq_id in lengths}
    for i in range(count):
        results = rig.run(*(step(seq_id, length - 1 + i, 1) for seq_id, length in lengths.items()))
        for seq_id, result in results.items():
            found[seq_id].append(result)
    return found


def test_a_whole_prefill_and_decode_in_a_batch_are_exact(rig: Rig) -> None:
    prompts = {1: PROMPT, 2: PROMPT[5:], 3: PROMPT[:1], 4: PROMPT[2:19]}
    first = rig.run(*(prefill(i, p, rig) for i, p in prompts.items()), new_seqs=[new(i, p) for i, p in prompts.items()])
    rest = decode(rig, {i: len(p) + 1 for i, p in prompts.items()})
    for i, prompt in prompts.items():
        rig.expect(prompt, [first[i], *rest[i]])


def test_a_chunked_prefill_beside_a_decode_is_exact(rig: Rig) -> None:
    other = PROMPT[::-1]
    results = [rig.run(prefill(1, other, rig), new_seqs=[new(1, other)])[1]]
    table = rig.blocks(12)
    chunks = [(0, 7), (7, 1), (8, 8), (16, 13), (29, 1)]
    last: list[SeqResult] = []
    for i, (start, count) in enumerate(chunks):
        part = step(2, start, count, table if i == 0 else None)
        part.sample = i == len(chunks) - 1
        fresh = [new(2, PROMPT)] if i == 0 else []
        found = rig.run(part, step(1, len(other) + i, 1), new_seqs=fresh)
        results.append(found[1])
        last = [found[2]] if 2 in found else []
    rig.expect(other, results)
    rig.expect(PROMPT, [*last, *decode(rig, {2: len(PROMPT) + 1})[2]])


def test_cached_blocks_are_shared(rig: Rig) -> None:
    table = rig.blocks(11)
    first = rig.run(step(1, 0, 30, table), new_seqs=[new(1, PROMPT)])[1]
    shared = PROMPT[:16] + PROMPT[3:11]
    second = rig.run(step(2, 16, 8, [*table[:4], *rig.blocks(6)]), step(1, 30, 1), new_seqs=[new(2, shared)])
    rest = decode(rig, {1: 32, 2: 25})
    rig.expect(PROMPT, [first, second[1], *rest[1]])
    rig.expect(shared, [second[2], *rest[2]])


def test_blocks_are_written_and_shared_in_one_step(rig: Rig) -> None:
    """The second sequence reads blocks that the first one writes in the same step."""
    table = rig.blocks(11)
    found = rig.run(
        step(1, 0, 30, table),
        step(2, 28, 1, [*table[:7], *rig.blocks(4)]),
        new_seqs=[new(1, PROMPT), new(2, PROMPT[:29])],
    )
    rest = decode(rig, {1: 31, 2: 30})
    rig.expect(PROMPT, [found[1], *rest[1]])
    rig.expect(PROMPT[:29], [found[2], *rest[2]])


def test_a_fork_copies_the_partly_filled_block(rig: Rig) -> None:
    """The prompt ends inside a block: the fork shares full blocks, copies the last block, and then diverges."""
    table = rig.blocks(11)
    first = rig.run(step(1, 0, 30, table), new_seqs=[new(1, PROMPT)])[1]
    forced = [*PROMPT, (first.token_ids[0] + 1) % VOCAB]
    copy = rig.blocks(4)
    found = rig.run(
        step(1, 30, 1),
        step(2, 30, 1, [*table[:7], *copy]),
        new_seqs=[new(2, forced)],
        copies=[(table[7], copy[0])],
    )
    rest = decode(rig, {1: 32, 2: 32})
    rig.expect(PROMPT, [first, found[1], *rest[1]])
    rig.expect(forced, [found[2], *rest[2]])


def test_a_fork_samples_from_the_shared_row(rig: Rig) -> None:
    table, copy = rig.blocks(11), rig.blocks(4)
    fork = SeqStep(seq_id=2, start=30, num_tokens=0, sample=True, logits_from=1, block_ids=[[*table[:7], *copy]])
    found = rig.run(step(1, 0, 30, table), fork, new_seqs=[new(1, PROMPT), new(2, PROMPT)])
    second = rig.run(step(1, 30, 1), step(2, 30, 1), copies=[(table[7], copy[0])])
    rest = decode(rig, {1: 32, 2: 32})
    for seq_id in (1, 2):
        rig.expect(PROMPT, [found[seq_id], second[seq_id], *rest[seq_id]])


def test_a_sequence_survives_a_swap_to_other_blocks(rig: Rig) -> None:
    assert rig.info.num_host_blocks >= 8
    table = rig.blocks(11)
    first = rig.run(step(1, 0, 30, table), new_seqs=[new(1, PROMPT)])[1]
    rig.run(swap_out=[(block, 7 - i) for i, block in enumerate(table[:8])], dropped_seqs=[1])
    rig.free = [*table, *rig.free]  # the next sequence overwrites them
    intruder = rig.run(step(2, 0, 30, [*table]), new_seqs=[new(2, PROMPT[::-1])])[2]
    rig.expect(PROMPT[::-1], [intruder])
    back = [b for b in range(100) if b not in table][:11]
    resumed = NewSeq(
        seq_id=3,
        token_ids=[*PROMPT, *first.token_ids],
        num_prompt_tokens=30,
        params=SamplingParams(temperature=0.0, logprobs=-1, max_tokens=99),
    )
    second = rig.run(
        step(3, 30, 1, back), new_seqs=[resumed], swap_in=[(7 - i, back[i]) for i in range(8)], dropped_seqs=[2]
    )[3]
    rig.expect(PROMPT, [first, second, *decode(rig, {3: 32})[3]])


def test_prompt_logprobs_equal_transformers(rig: Rig) -> None:
    asking = new(1, PROMPT)
    asking.params = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=5)
    chunk = step(1, 0, 20, rig.blocks(11))
    chunk.sample, chunk.num_prompt_logprobs = False, 20
    last = step(1, 20, 10)
    last.num_prompt_logprobs = 9
    found = [rig.run(chunk, new_seqs=[asking])[1], rig.run(last)[1]]
    entries = [entry for result in found for entry in result.prompt_logprobs or []]
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        want = rig.oracle(PROMPT[: position + 1])
        assert entry.token_ids[0] == PROMPT[position + 1]
        assert entry.logprobs[0] == pytest.approx(float(want[PROMPT[position + 1]]), abs=TOLERANCE)
        assert entry.token_ids[1:] == want.topk(2).indices.tolist()


def test_ready_info_reports_the_loaded_model(rig: Rig) -> None:
    info = rig.info
    assert (info.max_model_len, info.num_blocks, info.block_size) == (128, 100, BLOCK)
    assert (info.dtype, info.kv_dtype, info.device) == ("float32", "float32", "cpu")
    assert len(info.hash_root) == 32
    assert info.weights_bytes > 0
    assert info.kv_bytes > 0
