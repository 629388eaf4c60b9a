"""Chooses a step's rows of logits (for each sequence, one for its next token and one for each draft); accepts drafts.

A draft is accepted if the sampler chooses the same token at its position, so the tokens equal those of steps without
drafts, at every temperature.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from octavo_engine.sampling.sampler import SampleRows
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.wire.plan import SeqId, SeqResult, SeqStep

Ints = npt.NDArray[np.int64]


def rows_to_choose(
    sampling: list[SeqStep], last_row: Mapping[SeqId, int], held: Mapping[SeqId, SeqState]
) -> tuple[SampleRows, Ints]:
    """Return the rows to sample for these steps, in order, and the index of each row's hidden state. `last_row`: index
    of each sequence's last row before its drafts. `held`: all sequences."""
    first = [last_row[s.seq_id if s.logits_from is None else s.logits_from] for s in sampling]
    start = [s.start + s.num_tokens for s in sampling]
    counts = np.array([1 + len(s.draft_token_ids) for s in sampling], dtype=np.int64)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seqs = [held[s.seq_id] for s in sampling for _ in (0, *s.draft_token_ids)]
    rows = SampleRows(
        seqs=seqs,
        slots=np.array([seq.slot for seq in seqs], dtype=np.int64),
        positions=np.repeat(np.array(start, dtype=np.int64), counts) + offset,
        num_drafts=offset,
    )
    return rows, np.repeat(np.array(first, dtype=np.int64), counts) + offset


def accept_drafts(sampling: list[SeqStep], rows: list[SeqResult]) -> dict[SeqId, SeqResult]:
    """Join the results of each step's rows: the tokens up to and including the first that differs from its draft.

    Later rows do not count, and neither do their errors. If a row after the first has an error, the tokens end before
    it; the error recurs in the next step, in which this row is the first.
    """
    results, following = dict[SeqId, SeqResult](), iter(rows)
    for step in sampling:
        result, is_accepted = next(following), True
        results[step.seq_id] = result
        for draft in step.draft_token_ids:
            row = next(following)
            is_accepted = is_accepted and result.token_ids[-1:] == [draft] and row.error is None
            if is_accepted:
                result.token_ids += row.token_ids
                if result.logprobs is not None and row.logprobs is not None:
                    result.logprobs += row.logprobs
    return results
