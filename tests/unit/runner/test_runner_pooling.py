"""`Pooler` in steps in which none, one or all of the texts end, against the rows of each text."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from octavo_engine.runner import pooling
from octavo_engine.runner.pooling import Pooler
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import PoolingType
from octavo_engine.wire.plan import NewSeq, SeqResult, SeqStep
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.sampling import SamplingParams
from torch import Tensor

WIDTH = 8
REFERENCES: dict[PoolingType, Callable[[Tensor], Tensor]] = {
    "LAST": lambda rows: rows[-1],
    "CLS": lambda rows: rows[0],
    "MEAN": lambda rows: rows.float().mean(0),
}
#: Per step, the end of each text's part; the part of a text begins where the one before it ended.
STEPS = {
    "none, then all end": ([3, 5, 2], [7, 9, 4]),
    "none, one, then all end": ([3, 5, 2], [7, 6, 3], [7, 9, 4]),
    "one at a time": ([7, 1, 1], [7, 9, 1], [7, 9, 4]),
    "all end": ([7, 9, 4],),
    "none for long": ([1, 1, 1], [2, 2, 2], [3, 3, 3], [7, 9, 4]),
}
LENGTHS = [7, 9, 4]


def states() -> dict[int, SeqState]:
    made = {}
    for seq_id, length in enumerate(LENGTHS):
        new = NewSeq(seq_id=seq_id, token_ids=[1] * length, num_prompt_tokens=length, params=SamplingParams())
        new.pooling = PoolingParams(normalize=False)
        row = np.zeros(length + 1, dtype=np.int32)
        made[seq_id] = SeqState.from_new_seq(new, seq_id, row, vocab_size=2)
    return made


def pooled(kind: PoolingType, hidden: list[Tensor], ends: tuple[list[int], ...]) -> dict[int, SeqResult]:
    """Pool texts whose hidden rows are given, over several steps; check that each has its result in its last step."""
    pooler, seqs, results = Pooler(kind), states(), dict[int, SeqResult]()
    for begin, end in pairwise([[0] * len(LENGTHS), *ends]):
        parts = [(i, b, e) for i, (b, e) in enumerate(zip(begin, end, strict=True)) if e > b]
        steps = [SeqStep(seq_id=i, start=b, num_tokens=e - b, sample=e == LENGTHS[i]) for i, b, e in parts]
        counts = np.array([e - b for _, b, e in parts], dtype=np.int64)
        inputs: Any = type("Inputs", (), {"steps": steps, "num_rows": counts, "first_row": counts.cumsum() - counts})
        found = pooler.pool(inputs, torch.cat([hidden[i][b:e] for i, b, e in parts]), seqs)
        assert sorted(found) == [step.seq_id for step in steps if step.sample]
        results |= found
    return results


def vector(result: SeqResult) -> np.ndarray[Any, Any]:
    assert result.error is None
    assert result.embedding is not None
    return np.frombuffer(result.embedding, dtype="<f4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ends", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("kind", get_args(PoolingType))
def test_steps_in_which_none_one_or_all_end(kind: PoolingType, ends: tuple[list[int], ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden = [torch.randn(length, WIDTH, generator=draw).to(dtype) for length in LENGTHS]
    results = pooled(kind, hidden, ends)
    for seq_id, rows in enumerate(hidden):
        assert vector(results[seq_id]) == pytest.approx(REFERENCES[kind](rows).float().numpy(), abs=1e-5)


@pytest.mark.parametrize("kind", get_args(PoolingType))
def test_a_fault_in_one_result_ends_no_other(
    kind: PoolingType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = pooling._vector

    def fail_for_second(state: SeqState, row: Any) -> Any:
        if state.seq_id == 1:
            raise ValueError("no such vector")
        return make(state, row)

    monkeypatch.setattr(pooling, "_vector", fail_for_second)
    results = pooled(kind, [torch.ones(length, WIDTH) for length in LENGTHS], STEPS["none, then all end"])
    assert [result.error is None for _, result in sorted(results.items())] == [True, False, True]
    assert results[1].error is not None
    assert results[1].error.kind == "internal"
    assert "no such vector" in results[1].error.message
    assert [record.exc_info is not None for record in caplog.records] == [True]
