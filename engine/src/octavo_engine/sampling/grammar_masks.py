"""`GrammarMasks`: computes the tokens that the grammars of a step's sequences allow, concurrently with other work.

Masks of the next step are started as soon as this step's tokens are sampled: until the next forward pass, which needs
every core, one core is idle. A sequence whose mask was not started then, or that has drafts, gets its masks during the
forward pass. A thread computes them, mostly in calls of the library without the GIL; until it has ended, the runner's
thread accesses no state. Sequences without a grammar cost nothing.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from llguidance import LLMatcher
from torch import Tensor

from octavo_engine.devices.transfers import Copy, keep
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.post_reasoning import PostReasoningState
from octavo_engine.grammar.state import GrammarState, MaskWorker, Words
from octavo_engine.ops.token_bitmask import WORD_BITS, apply_token_bitmask
from octavo_engine.wire.plan import NewSeq, SeqId

AnyGrammarState = GrammarState | PostReasoningState
Output = npt.NDArray[np.int32]  # the tokens that a sequence has generated


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Masks for logits: `words[i]`, a bit per token, is for row `rows[i]`. `errors`: messages of rows that failed."""

    rows: list[int]
    words: Int[Tensor, "shaped words"]
    errors: dict[int, str]

    def apply(self, logits: Float[Tensor, "rows vocab"], copy: Copy = keep) -> None:
        """Apply the masks in place; they may exclude all tokens of a row. `copy`: copies a mask to the device of the
        logits."""
        apply_token_bitmask(logits, copy(torch.tensor(self.rows, dtype=torch.int64)), copy(self.words))


@dataclass(frozen=True, slots=True)
class _Place:
    """`row`: the mask after `output`; the next rows are the masks after each draft."""

    row: int
    state: AnyGrammarState
    output: Output
    drafts: list[int]

    def is_for(self, output: Output) -> bool:
        """Return True if the mask is for `output`, judged by its length and last token, as in `GrammarState`."""
        return len(output) == len(self.output) and (not len(output) or output[-1] == self.output[-1])


@dataclass(slots=True)
class _Masks:
    """The masks of some sequences. The library computes the bits; `finish` adds the states' stop ids.

    `done`: messages of failed sequences with drafts.
    """

    words: Words
    places: dict[SeqId, _Place]
    done: Future[dict[SeqId, str]] | None  # None: there was nothing to compute
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
        if self.done is not None:
            self.errors |= self.done.result()
        for seq_id, place in self.places.items():
            if not place.drafts:
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

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._states

    def begin(self, outputs: Mapping[SeqId, Output], drafts: Mapping[SeqId, list[int]]) -> dict[SeqId, list[int]]:
        """Start the masks of a step that `begin_next` did not. `outputs`: generated tokens per sampled sequence.

        Return the drafts of sequences with a grammar, cut before the first that the grammar forbids.
        """
        self._wait()
        shaped = {seq_id: output for seq_id, output in outputs.items() if seq_id in self._states}
        ahead, self._ahead, self._step = self._ahead, None, []
        if ahead is not None:
            ready = {
                i: place
                for i, place in ahead.places.items()
                if i in shaped and i not in drafts and self._is_ready(i, place, shaped[i])
            }
            shaped = {seq_id: output for seq_id, output in shaped.items() if seq_id not in ready}
            if not shaped.keys().isdisjoint(ahead.places):
                ahead.wait()  # the states of these sequences are moved next
            ahead.places = ready
            self._step.append(ahead)
        allowed = {i: self._allowed(i, shaped[i], drafts[i]) for i in shaped.keys() & drafts.keys()}
        if shaped:
            self._step.append(self._start(shaped, allowed))
        return allowed

    def begin_next(self, outputs: Mapping[SeqId, Output]) -> None:
        """Start the masks of the next step. `outputs`: generated tokens of sequences that may continue."""
        continuing = {
            seq_id: output.copy()
            for seq_id, output in outputs.items()
            if seq_id in self._states and not self._states[seq_id].is_end(int(output[-1]))
        }
        if continuing:
            self._wait()
            self._ahead = self._start(continuing, {})
            time.sleep(0)  # release the GIL, so that the thread enters the library's call, which runs without it

    def rows(self, seq_ids: list[SeqId], num_drafts: npt.NDArray[np.int64]) -> GrammarRows | None:
        """Return the masks for logits that have a row per sequence, or None. Blocks until the masks are computed.

        `num_drafts[i]`: drafts of its sequence before row i.
        """
        if not self._step:
            return None
        for masks in self._step:
            masks.finish()
        masks_of = {seq_id: masks for masks in self._step for seq_id in masks.places}
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in masks_of]
        if not rows:
            return None
        seq_ids = [seq_ids[row] for row in rows]
        at = [masks_of[i].places[i].row + num_drafts[row] for row, i in zip(rows, seq_ids, strict=True)]
        words = np.stack([masks_of[i].words[each] for i, each in zip(seq_ids, at, strict=True)])
        errors = {row: masks_of[i].errors[i] for row, i in zip(rows, seq_ids, strict=True) if i in masks_of[i].errors}
        return GrammarRows(rows=rows, words=torch.from_numpy(words), errors=errors)

    def _wait(self) -> None:
        """Wait for masks that a failed step has left in progress."""
        for masks in self._step:
            masks.wait()

    def _is_ready(self, seq_id: SeqId, place: _Place, output: Output) -> bool:
        return self._states[seq_id] is place.state and place.is_for(output)

    def _allowed(self, seq_id: SeqId, output: Output, drafts: list[int]) -> list[int]:
        return drafts[: self._states[seq_id].num_allowed(output, drafts)]

    def _start(self, shaped: Mapping[SeqId, Output], drafts: Mapping[SeqId, list[int]]) -> _Masks:
        places: dict[SeqId, _Place] = {}
        num_rows = 0
        for seq_id, output in shaped.items():
            place = places[seq_id] = _Place(num_rows, self._states[seq_id], output, drafts.get(seq_id, []))
            num_rows += 1 + len(place.drafts)
        words = np.zeros((num_rows, self._num_words), dtype=np.int32)
        alone = [place for place in places.values() if not place.drafts]
        work = [(matcher, place.row) for place in alone if (matcher := place.state.follow(place.output)) is not None]
        drafted = {seq_id: place for seq_id, place in places.items() if place.drafts}
        done = self._thread.submit(self._fill, work, drafted, words) if work or drafted else None
        return _Masks(words, places, done)

    def _fill(
        self, work: list[tuple[LLMatcher, int]], drafted: Mapping[SeqId, _Place], words: Words
    ) -> dict[SeqId, str]:
        """Compute masks, on the thread; return the messages of sequences with drafts that failed."""
        if work:
            self._worker.fill(work, words)
        errors: dict[SeqId, str] = {}
        for seq_id, place in drafted.items():
            rows = words[place.row : place.row + 1 + len(place.drafts)]
            if (error := place.state.fill(rows, place.output, place.drafts)) is not None:
                errors[seq_id] = error
        return errors
