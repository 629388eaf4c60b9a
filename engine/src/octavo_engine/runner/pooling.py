"""`Pooler`: makes the vectors of prompts from the hidden rows of their steps."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.devices.step_inputs import StepInputs
from octavo_engine.sampling.sampler import isolated
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import PoolingType
from octavo_engine.wire.plan import SeqId, SeqResult
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import ErrorInfo

NOT_FINITE = ErrorInfo("The model's vector is not finite (NaN or infinity): the weights or the dtype overflow.")


class Pooler:
    """Pools a prompt's rows: the last row (LAST), the first row (CLS) or the mean of all rows (MEAN).

    For CLS and MEAN, the scheduler uses no cached tokens, because they need the rows of the whole prompt.
    """

    def __init__(self, kind: PoolingType) -> None:
        self._kind = kind
        self.uses_all_rows = kind != "LAST"

    def pool(self, inputs: StepInputs, hidden: Tensor, seqs: Mapping[SeqId, SeqState]) -> dict[SeqId, SeqResult]:
        """Return the results of the sequences whose last prompt token this step has computed."""
        if self._kind != "LAST":
            self._collect(inputs, hidden, seqs)
        ended = [index for index, step in enumerate(inputs.steps) if step.sample]
        if not ended:
            return {}
        states = [seqs[inputs.steps[index].seq_id] for index in ended]
        if self._kind == "LAST":
            last = (inputs.first_row + inputs.num_rows)[ended] - 1
            pooled = hidden[torch.from_numpy(last).to(hidden.device)].float()
        else:
            pooled = torch.stack([_collected(state) for state in states])
        rows = pooled.cpu().numpy()
        if self._kind == "MEAN":
            rows = rows / np.array([[state.num_prompt_tokens] for state in states], dtype=np.float32)
        results, errors = dict[SeqId, SeqResult](), dict[int, ErrorInfo]()
        for state, row in zip(states, rows, strict=True):
            with isolated(errors, state.seq_id):
                results[state.seq_id] = _result(state, row)
        return results | {i: SeqResult(seq_id=i, token_ids=[], error=error) for i, error in errors.items()}

    def _collect(self, inputs: StepInputs, hidden: Tensor, seqs: Mapping[SeqId, SeqState]) -> None:
        """Add this step's rows to the sequences' sums, or keep their first rows."""
        rows = zip(inputs.steps, inputs.first_row.tolist(), inputs.num_rows.tolist(), strict=True)
        for step, first, count in rows:
            seq = seqs[step.seq_id]
            if self._kind == "MEAN":
                added = hidden[first : first + count].sum(0, dtype=torch.float32)
                seq.pooled = added if step.start == 0 else _collected(seq) + added
            elif step.start == 0:
                seq.pooled = hidden[first].to(torch.float32, copy=True)  # the step's rows are overwritten later


def _collected(seq: SeqState) -> Tensor:
    assert seq.pooled is not None, f"the first rows of sequence {seq.seq_id} were not computed"
    return seq.pooled


def _result(seq: SeqState, row: npt.NDArray[np.float32]) -> SeqResult:
    if not np.isfinite(row).all():
        return SeqResult(seq_id=seq.seq_id, token_ids=[], error=NOT_FINITE)
    return SeqResult(seq_id=seq.seq_id, token_ids=[], embedding=_vector(seq, row).astype("<f4").tobytes())


def _vector(seq: SeqState, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    params = seq.pooling or PoolingParams()  # the warm-up's sequences have none
    vector = row[: params.dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if params.normalize else vector
