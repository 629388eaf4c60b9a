"""Which tokens the grammars of a step's sequences allow, worked out on a thread while the forward pass runs.

The runner says what a step will sample before it computes, and asks for the masks when it has the logits. Sequences
without a grammar cost nothing.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.reasoned import ReasonedState
from octavo_engine.grammar.state import GrammarState
from octavo_engine.wire.plan import NewSeq, SeqId, SeqStep

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """`blocked[i]` is about row `rows[i]` of the logits; `errors`: rows that their grammar can't continue."""

    rows: list[int]
    blocked: Bool[Tensor, "shaped vocab"]
    errors: dict[int, str]

    def apply(self, logits: Float[Tensor, "rows vocab"]) -> None:
        if len(self.rows) == len(logits):
            logits.masked_fill_(self.blocked, _NEVER)
            return
        for row, blocked in zip(self.rows, self.blocked, strict=True):
            logits[row].masked_fill_(blocked, _NEVER)


@dataclass(frozen=True, slots=True)
class _Computed:
    place: dict[SeqId, int]
    blocked: Tensor
    errors: dict[SeqId, str]


class GrammarMasks:
    def __init__(self, compiler: GrammarCompiler, *, vocab_size: int, device: torch.device) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[SeqId, GrammarState | ReasonedState] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._step: Future[_Computed] | None = None

    def drop(self, seq_ids: list[SeqId]) -> None:
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def add(self, new: NewSeq) -> None:
        self._states.pop(new.seq_id, None)
        if new.grammar is None:
            return
        params = new.params
        state = GrammarState(
            self._compiler.get(new.grammar),
            stop_ids=[*(params.stop_token_ids or ()), *([] if new.eos_token_id is None else [new.eos_token_id])],
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        )
        start_id, end_id = params.reasoning_start_token_id, params.reasoning_end_token_id
        self._states[new.seq_id] = state if end_id is None else ReasonedState(state, start_id=start_id, end_id=end_id)

    def begin(self, outputs: dict[SeqId, npt.NDArray[np.int32]]) -> None:
        """`outputs`: what the sequences that this step samples have generated so far."""
        shaped = [(seq_id, self._states[seq_id], out) for seq_id, out in outputs.items() if seq_id in self._states]
        self._step = self._thread.submit(self._compute, shaped) if shaped else None

    def rows(self, steps: list[SeqStep]) -> GrammarRows | None:
        """For logits that have a row for each of `steps`; waits for the thread."""
        if self._step is None:
            return None
        computed = self._step.result()
        rows = [row for row, step in enumerate(steps) if step.seq_id in computed.place]
        if not rows:
            return None
        places = [computed.place[steps[row].seq_id] for row in rows]
        in_order = places == list(range(len(computed.place)))
        return GrammarRows(
            rows=rows,
            blocked=computed.blocked if in_order else computed.blocked[places],
            errors={row: error for row in rows if (error := computed.errors.get(steps[row].seq_id))},
        )

    def _compute(self, shaped: list[tuple[SeqId, GrammarState | ReasonedState, npt.NDArray[np.int32]]]) -> _Computed:
        words = np.zeros((len(shaped), 1, -(-self._vocab_size // 32)), dtype=np.int32)
        errors: dict[SeqId, str] = {}
        for row, (seq_id, state, output) in enumerate(shaped):
            error = state.fill(words[row], output)
            if error is not None:
                errors[seq_id] = error
        allowed = np.unpackbits(words[:, 0].view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        return _Computed(
            place={seq_id: row for row, (seq_id, _, _) in enumerate(shaped)},
            blocked=torch.from_numpy(allowed == 0).to(self._device),
            errors=errors,
        )
