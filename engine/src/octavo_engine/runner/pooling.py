"""Takes the vectors of finished prompts from the hidden rows of a step."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.runner.batch import StepInputs
from octavo_engine.runner.seq_state import SeqState
from octavo_engine.wire.plan import SeqId, SeqResult
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import ErrorInfo

NOT_FINITE = ErrorInfo("The model's vector is not finite (NaN or infinity): the weights or the dtype overflow.")


def pool(inputs: StepInputs, hidden: Tensor, seqs: Mapping[SeqId, SeqState]) -> dict[SeqId, SeqResult]:
    """Return the results of the sequences whose last prompt token this step has computed: its row is their vector."""
    ended = [index for index, step in enumerate(inputs.steps) if step.sample]
    last = (inputs.first_row + inputs.num_rows)[ended] - 1
    rows = hidden[torch.from_numpy(last).to(hidden.device)].float().cpu().numpy()
    seq_ids = [inputs.steps[index].seq_id for index in ended]
    return {seq_id: _result(seqs[seq_id], row) for seq_id, row in zip(seq_ids, rows, strict=True)}


def _result(seq: SeqState, row: npt.NDArray[np.float32]) -> SeqResult:
    if not np.isfinite(row).all():
        return SeqResult(seq_id=seq.seq_id, token_ids=[], error=NOT_FINITE)
    params = seq.pooling or PoolingParams()  # the warm-up's sequences have none
    vector = row[: params.dimensions]
    if params.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return SeqResult(seq_id=seq.seq_id, token_ids=[], embedding=vector.astype("<f4").tobytes())
