"""`GrammarMasks`: computes the tokens that the grammars of a step's sequences allow, concurrently with other work.

Masks of the next step are started as soon as this step's tokens are sampled: until the next forward pass, which needs
every core, one core is idle. A sequence whose mask was not started then gets it at the beginning of its step. Only
the library's own work runs on a thread, in one call without the GIL; only the runner's thread accesses the states.
Sequences without a grammar cost nothing.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.mask_worker import MaskWorker
from octavo_engine.grammar.post_reasoning import PostReasoningState
from octavo_engine.grammar.state import GrammarState, Words
from octavo_engine.ops.token_bitmask import WORD_BITS, apply_token_bitmask
from octavo_engine.wire.plan import NewSeq, SeqId, SeqStep

AnyGrammarState = GrammarState | PostReasoningState
Output = npt.NDArray[np.int32]  # the tokens that a sequence has generated


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Masks for logits: `words[i]`, a bit per token, is for row `rows[i]`. `errors`: messages of rows that failed."""

    rows: list[int]
    words: Int[Tensor, "shaped words"]
    errors: dict[int, str]

    def apply(self, logits: Float[Tensor, "rows vocab"]) -> list[int]:
        """Apply the masks in place; return the rows that are left without a token."""
        has_token = apply_token_bitmask(logits, torch.tensor(self.rows, dtype=torch.int64), self.words).tolist()
        return [row for row, has_one in zip(self.rows, has_token, strict=True) if not has_one]


@dataclass(frozen=True, slots=True)
class _Place:
    row: int
    state: AnyGrammarState
    output: Output

    def is_for(self, output: Output) -> bool:
        """Return True if the mask is for `output`, judged by its length and last token, as in `GrammarState`."""
        return len(output) == len(self.output) and (not len(output) or output[-1] == self.output[-1])


@dataclass(slots=True)
class _Masks:
    """The masks of some sequences. The library computes the bits; `finish` adds the states' stop ids."""

    words: Words
    places: dict[SeqId, _Place]
    done: Future[None] | None  # None: there was nothing to compute
    errors: dict[SeqId, str] = field(default_factory=dict)
    is_finished: bool = False

    def wait(self) -> None:
        """Block until the mask thread no longer uses the grammar states."""
        if self.done is not None:
            self.done.result()

    def finish(self) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        self.wait()
        for seq_id, place in self.places.items():
            error = place.state.finish(self.words[place.row], len(place.output))
            if error is not None:
                self.errors[seq_id] = error


class GrammarMasks:
    def __init__(self, compiler: GrammarCompiler, *, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // WORD_BITS)
        self._states: dict[SeqId, AnyGrammarState] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._worker = MaskWorker()
        self._ahead: _Masks | None = None
        self._step: list[_Masks] = []

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
        self._states[new.seq_id] = (
            state if end_id is None else PostReasoningState(state, start_id=start_id, end_id=end_id)
        )

    def begin(self, outputs: Mapping[SeqId, Output]) -> None:
        """Start the masks of a step that `begin_next` did not. `outputs`: generated tokens per sampled sequence."""
        self._wait()
        shaped = {seq_id: output for seq_id, output in outputs.items() if seq_id in self._states}
        ahead, self._ahead, self._step = self._ahead, None, []
        if ahead is not None:
            ready = {
                i: place for i, place in ahead.places.items() if i in shaped and self._is_ready(i, place, shaped[i])
            }
            shaped = {seq_id: output for seq_id, output in shaped.items() if seq_id not in ready}
            if not shaped.keys().isdisjoint(ahead.places):
                ahead.wait()  # the states of these sequences are moved next
            ahead.places = ready
            self._step.append(ahead)
        if shaped:
            self._step.append(self._start(shaped))

    def begin_next(self, outputs: Mapping[SeqId, Output]) -> None:
        """Start the masks of the next step. `outputs`: generated tokens of sequences that may continue."""
        continuing = {
            seq_id: output.copy()
            for seq_id, output in outputs.items()
            if seq_id in self._states and not self._states[seq_id].is_end(int(output[-1]))
        }
        if continuing:
            self._wait()
            self._ahead = self._start(continuing)
            time.sleep(0)  # release the GIL, so that the thread enters the library's call, which runs without it

    def rows(self, steps: list[SeqStep]) -> GrammarRows | None:
        """Return the masks for logits with a row for each of `steps`, or None; blocks until they are computed."""
        if not self._step:
            return None
        for masks in self._step:
            masks.finish()
        found = {seq_id: masks for masks in self._step for seq_id in masks.places}
        rows = [row for row, step in enumerate(steps) if step.seq_id in found]
        if not rows:
            return None
        seq_ids = [steps[row].seq_id for row in rows]
        words = np.stack([found[seq_id].words[found[seq_id].places[seq_id].row] for seq_id in seq_ids])
        errors = {row: found[i].errors[i] for row, i in zip(rows, seq_ids, strict=True) if i in found[i].errors}
        return GrammarRows(rows=rows, words=torch.from_numpy(words), errors=errors)

    def _wait(self) -> None:
        """Wait for masks that a failed step has left in progress."""
        for masks in self._step:
            masks.wait()

    def _is_ready(self, seq_id: SeqId, place: _Place, output: Output) -> bool:
        return self._states[seq_id] is place.state and place.is_for(output)

    def _start(self, shaped: Mapping[SeqId, Output]) -> _Masks:
        words = np.zeros((len(shaped), self._num_words), dtype=np.int32)
        places = {
            seq_id: _Place(row, self._states[seq_id], output) for row, (seq_id, output) in enumerate(shaped.items())
        }
        work = [(matcher, p.row) for p in places.values() if (matcher := p.state.follow(p.output)) is not None]
        return _Masks(words, places, self._thread.submit(self._worker.fill, work, words) if work else None)
