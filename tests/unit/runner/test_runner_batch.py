"""The persistent batch: slots, tables, and a step's tensors, which equal those of a loop over sequences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from octavo_engine.devices.step_inputs import StepInputs
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.sampling.draws import seed_keys
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.records import ImageSpan
from octavo_engine.wire.sampling import SamplingParams

BLOCK = 4


@pytest.fixture
def batch() -> PersistentBatch:
    made = PersistentBatch(
        max_num_seqs=3, max_model_len=32, block_size=BLOCK, vocab_size=100, device=torch.device("cpu")
    )
    for seq_id, length in ((10, 9), (11, 3), (12, 6)):
        made.add(new_seq(seq_id, length))
    return made


def new_seq(seq_id: int, length: int) -> NewSeq:
    return NewSeq(
        seq_id=seq_id,
        token_ids=[seq_id * 10 % 97 + i for i in range(length)],
        num_prompt_tokens=length,
        params=SamplingParams(),
        seed=seq_id,
    )


def step(seq_id: int, start: int, num_tokens: int, blocks: list[int], table_start: int = 0) -> SeqStep:
    return SeqStep(
        seq_id=seq_id,
        start=start,
        num_tokens=num_tokens,
        sample=True,
        table_start=table_start,
        block_ids=[blocks] if blocks else [],
    )


def inputs(batch: PersistentBatch, *steps: SeqStep) -> StepInputs:
    plan = StepPlan(step_id=0, seqs=list(steps))
    batch.update_tables(plan)
    made = batch.inputs(plan)
    assert made is not None
    return made


def test_inputs_of_a_mixed_step_equal_a_loop(batch: PersistentBatch) -> None:
    made = inputs(batch, step(12, 2, 4, [5, 6]), step(10, 8, 1, [7, 8, 9]), step(11, 0, 3, [2]))
    assert made.input_ids.tolist() == [25, 26, 27, 28, 11, 13, 14, 15]
    assert made.positions.tolist() == [2, 3, 4, 5, 8, 0, 1, 2]
    assert made.attention.slots.tolist() == [22, 23, 24, 25, 36, 8, 9, 10]
    assert made.attention.query_start.tolist() == [0, 4, 5, 8]
    assert made.attention.seq_lens.tolist() == [6, 9, 3]
    assert made.attention.block_tables[:, :1].tolist() == [[5], [7], [2]]
    assert made.attention.block_tables[1].tolist() == [7, 8, 9]
    assert (made.attention.max_query_len, made.attention.max_seq_len) == (4, 9)
    assert made.first_row.tolist() == [0, 4, 5]
    assert made.num_rows.tolist() == [4, 1, 3]


def test_positions_of_images_have_coordinates_in_the_steps_that_compute_them(batch: PersistentBatch) -> None:
    """Positions of tokens: 0, 1, an image of 2 x 3 at 2, 3 and 4, a text at 5, an image of 1 x 2 at 6, a text at 8."""
    images = (
        ImageSpan(start=2, length=6, digest=b"a", grid=(2, 3)),
        ImageSpan(start=9, length=2, digest=b"b", grid=(1, 2)),
    )
    batch.drop([11])
    batch.add(replace(new_seq(13, 13), images=images))
    blocks, other = [4, 5, 6, 7], step(10, 8, 1, [1, 2, 3])
    whole = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert inputs(batch, step(13, 0, 13, blocks)).positions.tolist() == whole
    for first, end in [(0, 2), (1, 3), (4, 7), (5, 13), (8, 9), (8, 11), (9, 10), (11, 13), (12, 13)]:
        made = inputs(batch, other, step(13, first, end - first, []))
        wanted = [[8, *axis[first:end]] for axis in whole]
        is_plain = wanted[0] == wanted[1] == wanted[2]
        assert made.positions.tolist() == (wanted[0] if is_plain else wanted)
        place = end - 1
        assert made.attention.slots[place - first + 1].item() == blocks[place // BLOCK] * BLOCK + place % BLOCK
    decode = replace(step(13, 12, 1, []), draft_token_ids=[5, 6])
    assert inputs(batch, decode).positions.tolist() == [9, 10, 11]
    batch.drop([13])
    batch.add(new_seq(14, 6))
    assert inputs(batch, step(14, 5, 1, [1, 2])).positions.tolist() == [5], "a sequence left its slot an offset"


def test_a_fork_that_computes_nothing_is_not_in_the_forward_pass(batch: PersistentBatch) -> None:
    made = inputs(batch, step(10, 0, 9, [1, 2, 3]), step(11, 3, 0, [4]))
    assert [s.seq_id for s in made.steps] == [10]
    assert batch.inputs(StepPlan(step_id=1, seqs=[step(11, 3, 0, [])])) is None
    assert batch.inputs(StepPlan(step_id=2)) is None


def test_a_table_is_overwritten_from_an_entry_on(batch: PersistentBatch) -> None:
    inputs(batch, step(10, 0, 9, [1, 2, 3]))
    appended = inputs(batch, step(10, 9, 1, [8], table_start=2))
    assert appended.attention.block_tables.tolist() == [[1, 2, 8]]
    assert appended.attention.slots.tolist() == [8 * BLOCK + 1]
    unchanged = inputs(batch, step(10, 10, 1, []))
    assert unchanged.attention.block_tables.tolist() == [[1, 2, 8]]


def test_appended_tokens_are_the_next_inputs(batch: PersistentBatch) -> None:
    batch.append(batch.slots_of([11]), np.array([3]), 77)
    assert inputs(batch, step(11, 3, 1, [1])).input_ids.tolist() == [77]


def test_slots_are_reused(batch: PersistentBatch) -> None:
    for seq_id in range(20, 200):
        batch.drop([min(batch.seqs), 999])
        batch.add(new_seq(seq_id, 5))
    assert len({seq.slot for seq in batch.seqs.values()}) == len(batch.seqs) == 3


def test_a_sequence_added_again_starts_afresh(batch: PersistentBatch) -> None:
    batch.add(new_seq(11, 8))
    assert len(batch.seqs) == 3
    assert inputs(batch, step(11, 6, 2, [3, 4])).input_ids.tolist() == [19, 20]


def test_parameters_go_to_their_columns(batch: PersistentBatch) -> None:
    batch.drop([11])
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, logprobs=2, presence_penalty=1.0)
    batch.add(NewSeq(seq_id=30, token_ids=[1, 2], num_prompt_tokens=1, params=params, seed=-5))
    slot, columns = batch.seqs[30].slot, batch.columns
    draw = columns.draws[slot]
    assert (draw["temperature"], draw["inverse_temperature"], draw["top_k"], draw["top_p"]) == (0.5, 2.0, 7, 0.8)
    assert draw["least_scaled"] == np.float32(np.log(np.float64(np.float32(0.1))))
    assert draw["key"] == seed_keys(np.array([2**64 - 5], dtype=np.uint64))[0]
    assert columns.edits_logits[slot]
    assert columns.wants_logprobs[slot]
    assert batch.seqs[30].output(2).tolist() == [2]


def test_inputs_reach_a_device_by_one_copy(batch: PersistentBatch) -> None:
    copied: list[torch.Tensor] = []

    def copy(values: torch.Tensor) -> torch.Tensor:
        copied.append(values.clone())
        return copied[-1]

    steps = step(12, 2, 4, [5, 6]), step(10, 8, 1, [7, 8, 9]), step(11, 0, 3, [2])
    want = inputs(batch, *steps)
    batch.copy = copy
    made = inputs(batch, *steps)
    (moved,) = copied
    for name in ("query_start", "seq_lens", "block_tables", "slots", "positions"):
        part, expected = (getattr(x if name == "positions" else x.attention, name) for x in (made, want))
        assert part.dtype == torch.int32
        assert part.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
        assert part.is_contiguous()
        assert torch.equal(part, expected.to(torch.int32))
    assert torch.equal(made.input_ids, want.input_ids.to(torch.int32))
