"""`PersistentBatch`: the runner's sequences as arrays with one row (slot) per sequence, and the inputs of each step.

Arrays are allocated once, and a plan writes only differences to them. A sequence keeps its slot until it is dropped.
The inputs of the forward pass are computed with numpy, without a Python loop of computations per sequence: lengths and
starts are gathered into columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_engine.devices.step_inputs import Ints, Place, PlacedStep, StepArrays, StepInputs, StepLimits
from octavo_engine.devices.transfers import Copy, keep
from octavo_engine.ops.attention import AttentionBatch
from octavo_engine.sampling.sampler import SampleRows, SamplingColumns
from octavo_engine.sampling.seq_state import SeqState
from octavo_engine.settings.records import MAX_GPU_LOGITS, MAX_LOGITS
from octavo_engine.wire.plan import NewSeq, SeqId, SeqStep, StepPlan

UNKNOWN = -1  # stands for a token that a step in flight samples


class PersistentBatch:
    """`copy` moves a step's inputs, as one int32 tensor, to the device; None: the device is the CPU.

    `starts_ahead`: a step may start before the tokens of the one before it are known, which are then `UNKNOWN` here.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        copy: Copy | None = None,
        starts_ahead: bool = False,
    ) -> None:
        self.copy = copy
        self.block_size = block_size
        self.seqs: dict[SeqId, SeqState] = {}
        self.columns = SamplingColumns(max_num_seqs)
        self.vocab_size = vocab_size
        self.newest = NewestTokens(max_num_seqs, device, copy or keep) if starts_ahead else None
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self._offsets = np.zeros(max_num_seqs, dtype=np.int64)  # position minus index of tokens after the last image
        self._grid_ends = np.zeros(max_num_seqs, dtype=np.int64)  # index after the last image with a grid
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def limits(self) -> StepLimits:
        slots, longest = self._token_ids.shape
        return StepLimits(max_num_seqs=slots, max_model_len=longest - 1, table_width=self._tables.shape[1])

    @property
    def logit_rows(self) -> int:
        """The number of rows of logits that are computed at a time."""
        return max(1, (MAX_LOGITS if self.copy is None else MAX_GPU_LOGITS) // self.vocab_size)

    def drop(self, seq_ids: list[SeqId]) -> None:
        """Remove sequences. Unknown ids are ignored: a sequence may be dropped before its first step."""
        for seq_id in seq_ids:
            seq = self.seqs.pop(seq_id, None)
            if seq is not None:
                self._free_slots.append(seq.slot)

    def add(self, new: NewSeq) -> None:
        self.drop([new.seq_id])
        slot = self._free_slots.pop()
        row = self._token_ids[slot]
        row[: len(new.token_ids)] = new.token_ids
        seq = SeqState.from_new_seq(new, slot, row, vocab_size=self.vocab_size, copy=self.copy or keep)
        self.seqs[new.seq_id] = seq
        self.columns.set(seq, new.seed)
        self._offsets[slot] = seq.offset
        self._grid_ends[slot] = 0 if seq.positions is None else seq.positions.shape[1]

    def update_tables(self, plan: StepPlan) -> None:
        for step in plan.seqs:
            if step.block_ids:
                ids = step.block_ids[0]
                self._tables[self.seqs[step.seq_id].slot, step.table_start : step.table_start + len(ids)] = ids

    def append(self, slots: Ints, positions: Ints, token_ids: Ints | int) -> None:
        """Store the tokens at these positions of the sequences in these slots."""
        self._token_ids[slots, positions] = token_ids

    def expect(self, rows: SampleRows, tokens: Tensor) -> None:
        """Keep the tokens that the device samples for these rows until the host knows them."""
        if self.newest is not None:
            self.newest.store(rows.slots, tokens)
            self.append(rows.slots, rows.positions, UNKNOWN)

    def sort_by_adapter(self, plan: StepPlan) -> StepPlan:
        """Return the plan sorted: first sequences without an adapter, then those of each adapter."""
        if not any(seq.adapter for seq in self.seqs.values()):
            return plan
        return replace(plan, seqs=sorted(plan.seqs, key=self._adapter))

    def has_adapters(self, plan: StepPlan) -> bool:
        return any(self._adapter(step) for step in plan.seqs)

    def adapter_rows(self, inputs: StepInputs) -> dict[str, slice]:
        """Return the rows of each adapter, in a step whose plan is sorted."""
        rows, ends = {}, inputs.first_row + inputs.num_rows
        for adapter, group in groupby(range(len(inputs.steps)), lambda i: self._adapter(inputs.steps[i])):
            indices = list(group)
            if adapter:
                rows[adapter] = slice(int(inputs.first_row[indices[0]]), int(ends[indices[-1]]))
        return rows

    def _adapter(self, step: SeqStep) -> str:
        return self.seqs[step.seq_id].adapter

    def inputs(self, plan: StepPlan, place: Place | None = None) -> StepInputs | None:
        """Build the step's inputs, drafts included; return None if the plan computes no tokens.

        `place`: copies the inputs to the buffers of a graph that can run the step. None: the inputs are new tensors.
        """
        steps = [step for step in plan.seqs if step.num_tokens]
        if not steps:
            return None
        num_drafts = np.array([len(step.draft_token_ids) for step in steps])
        for step in (steps[i] for i in np.flatnonzero(num_drafts)):
            end = step.start + step.num_tokens
            self.seqs[step.seq_id].token_ids[end : end + len(step.draft_token_ids)] = step.draft_token_ids
        slots = self.slots_of([step.seq_id for step in steps])
        start = np.array([step.start for step in steps])
        num_rows = num_drafts + np.array([step.num_tokens for step in steps])
        query_start = np.zeros(len(steps) + 1, dtype=np.int64)
        np.cumsum(num_rows, out=query_start[1:])
        first_row, places, seq_slot = query_start[:-1], start, slots
        if query_start[-1] > len(steps):
            places = np.arange(query_start[-1]) + np.repeat(start - first_row, num_rows)
            seq_slot = np.repeat(slots, num_rows)
        parts, offsets = np.divmod(places, self.block_size)
        lengths = start + num_rows
        longest = int(lengths.max())
        token_ids = self._token_ids[seq_slot, places].astype(np.int64)
        has_unknown = self.newest is not None and bool((token_ids == UNKNOWN).any())
        arrays = StepArrays(
            input_ids=token_ids,
            positions=self._positions(steps, places, slots, start, first_row, num_rows),
            slots=self._tables[seq_slot, parts] * np.int64(self.block_size) + offsets,
            seq_slots=seq_slot if has_unknown else seq_slot[:0],
            query_start=query_start.astype(np.int32),
            seq_lens=lengths.astype(np.int32),
            block_tables=self._tables[slots, : -(-longest // self.block_size)],
        )
        placed = (None if place is None else place(arrays)) or self._place(arrays)
        return StepInputs(
            input_ids=placed.input_ids,
            positions=placed.positions,
            attention=placed.attention,
            steps=steps,
            first_row=first_row,
            num_rows=num_rows,
            num_drafts=num_drafts,
            start=start,
            replay=placed.replay,
        )

    def _positions(
        self, steps: list[SeqStep], places: Ints, slots: Ints, start: Ints, first_row: Ints, num_rows: Ints
    ) -> Ints:
        """Return each row's position, [rows]; if a row has three different coordinates (M-RoPE), return all rows'
        coordinates, [3, rows]."""
        if not self._grid_ends[slots].any():
            return places
        positions = places + np.repeat(self._offsets[slots], num_rows)
        within = np.flatnonzero(start < self._grid_ends[slots])
        if not len(within):
            return positions
        coordinates = np.tile(positions, (3, 1))
        for i in within.tolist():
            known = self.seqs[steps[i].seq_id].positions
            assert known is not None, "a sequence without a grid is within one"
            found = known[:, start[i] : start[i] + num_rows[i]]
            coordinates[:, first_row[i] : first_row[i] + found.shape[1]] = found
        return coordinates if (coordinates != coordinates[0]).any() else coordinates[0]

    def table_of(self, seq_id: SeqId) -> npt.NDArray[np.int32]:
        """Return a sequence's row of block ids; the row may be longer than its table."""
        row: npt.NDArray[np.int32] = self._tables[self.seqs[seq_id].slot]
        return row

    def blocks_at(self, seq_ids: list[SeqId], positions: Ints) -> Ints:
        """Return each sequence's block at its position."""
        return self._tables[self.slots_of(seq_ids), positions // self.block_size].astype(np.int64)

    def slots_of(self, seq_ids: list[SeqId]) -> Ints:
        return np.array([self.seqs[i].slot for i in seq_ids], dtype=np.int64)

    def fill_in(self, input_ids: Tensor, seq_slots: Tensor) -> Tensor:
        """Return input ids with the newest tokens of these slots in place of unknown ones."""
        return input_ids if self.newest is None else self.newest.fill_in(input_ids, seq_slots)

    def _place(self, arrays: StepArrays) -> PlacedStep:
        """Move the arrays to new tensors."""
        input_ids, positions, slots, seq_slots, query_start, seq_lens, block_tables = self._tensors(arrays)
        attention = AttentionBatch(
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slots=slots,
            max_query_len=arrays.max_query_len,
            max_seq_len=int(arrays.seq_lens.max()),
            num_keys=arrays.num_keys,
        )
        if len(seq_slots):
            input_ids = self.fill_in(input_ids, seq_slots)
        return PlacedStep(input_ids=input_ids, positions=positions, attention=attention)

    def _tensors(self, arrays: Sequence[npt.NDArray[np.signedinteger[Any]]]) -> list[Tensor]:
        """Return the arrays on the device, where all are int32."""
        if self.copy is None:
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        flat = np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="same_kind")
        parts = self.copy(torch.from_numpy(flat)).split_with_sizes([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class NewestTokens:
    """Each slot's newest token, on the device, for steps that start before the host has received the token.

    `copy`: copies a host tensor to the device.
    """

    def __init__(self, num_slots: int, device: torch.device, copy: Copy) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._copy = copy

    def store(self, slots: npt.NDArray[np.int64], tokens: Tensor) -> None:
        """Store the tokens of slots; -1 marks an error: the slot gets token 0, whose results are dropped later."""
        self.tokens.index_copy_(0, self._copy(torch.from_numpy(slots)), tokens.clamp(min=0))

    def fill_in(self, input_ids: Tensor, slots: Tensor) -> Tensor:
        """Return input ids with the newest tokens of their slots in place of unknown ones."""
        return torch.where(input_ids == UNKNOWN, self.tokens[slots].to(input_ids.dtype), input_ids)
