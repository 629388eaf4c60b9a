"""Decode steps that run again without the model's Python code: a quarter of a step of a small model on a CPU.

A graph belongs to one model and computes its hidden rows; the head, sampling and log-probabilities stay outside.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_engine.devices.memory import MIB
from octavo_engine.devices.step_inputs import FillIn, Forward, PlacedStep, StepArrays, StepInputs
from octavo_engine.ops.attention import AttentionBackend, ForwardContext
from octavo_engine.ops.recording import Recording, record
from octavo_engine.ops.recording_pool import Pool
from octavo_engine.wire.plan import StepPlan

_LOGGER = logging.getLogger(__name__)
MAX_RECORDED_ROWS = 512  # rows of a recorded step; larger steps gain nothing
_MOST_OUTPUT_BYTES = 64 * MIB
_MOST_OPERATORS = 1 << 16  # of all recordings together
_OPERATOR_BYTES = 768  # of a listed operator with its arguments
#: The most memory of recordings with operators of torch: outputs of a step, and the lists of operators.
MOST_BYTES = _MOST_OUTPUT_BYTES + _MOST_OPERATORS * _OPERATOR_BYTES


def may_replay(plan: StepPlan) -> bool:
    """Return True if a graph can compute this step: one token of each sequence with its drafts, and no other rows.

    A feature that computes in the forward pass from anything beside tokens, positions and the KV cache must return
    False here: a graph would repeat the work of another step. The runner does not ask for steps with adapters. A
    recording repeats the operations of a group of ranks.
    """
    return all(step.num_tokens == 1 and step.logits_from is None and not step.num_prompt_logprobs for step in plan.seqs)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A recording for one number of rows. `hidden` makes the tensor of its output."""

    recording: Recording
    hidden: Callable[[], Tensor]


class RecordedSteps:
    """`StepGraphs` on a CPU: the second decode step of each number of rows is recorded, later ones are replayed.

    If a model needs an operator that cannot be repeated, or memory is short, all its steps are eager from then on.
    """

    def __init__(self, forward: Forward, constants: Iterable[Tensor] = ()) -> None:
        self._forward = forward
        self.graphs: dict[int, StepGraph | None] = {}  # None: one eager step so far, which has warmed all caches
        self._state: tuple[AttentionBackend, int] | None = None
        self._is_eager = False
        self._most_rows, self._num_operators = MAX_RECORDED_ROWS, 0
        self._inputs = torch.zeros(2, MAX_RECORDED_ROWS, dtype=torch.int64)  # token ids and positions
        self._numbers = self._inputs.numpy()
        self._known = (self._inputs, *constants)
        self.pool = Pool()

    def capture_all(self, backend: AttentionBackend, fill_in: FillIn) -> None:
        """Do nothing: a recording needs a step."""

    def place(self, arrays: StepArrays) -> PlacedStep | None:
        """Return None: a recording reads the host's own numbers."""

    def run(self, inputs: StepInputs, context: ForwardContext) -> Tensor | None:
        rows = len(inputs.input_ids)
        if self._is_eager or rows > self._most_rows:
            return None
        state = context.backend, torch.get_num_threads()
        if state != self._state:
            self._state = state
            self._clear()
        graph = self.graphs.get(rows)
        if rows not in self.graphs or (graph is None and self._num_operators >= _MOST_OPERATORS):
            self.graphs[rows] = None
            return None
        context.backend.begin_step(context.batch)
        self._numbers[0, :rows], self._numbers[1, :rows] = inputs.input_ids.numpy(), inputs.positions.numpy()
        if graph is None:
            return self._capture(self._inputs[0, :rows], self._inputs[1, :rows], context)
        graph.recording.replay()
        return graph.hidden()

    def _capture(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor | None:
        """Run the step eagerly and record it."""
        try:
            with record(self.pool, *self._known) as recording:
                hidden = self._forward(input_ids, positions, context)
        except (MemoryError, OSError) as error:  # raised by `mmap`, which holds the calls
            if recording.has_exchanged:  # other ranks expect each operation only once, so the step cannot be repeated
                raise
            self._give_up(f"{error}: free some memory or set --enforce-eager")
            return None
        output = self.pool.locate(hidden)
        if recording.refused is None and output is not None:
            self.graphs[len(input_ids)] = StepGraph(recording, output)
            self._num_operators += recording.num_operators
            self._limit_outputs(len(input_ids))
        else:
            self._give_up(f"they need {recording.refused or 'an output'} from torch")
        return hidden

    def _limit_outputs(self, rows: int) -> None:
        """Record only smaller steps from now on if the outputs of a step of `rows` are too large; they grow with it."""
        if self.pool.used_bytes > _MOST_OUTPUT_BYTES:
            self._most_rows = rows * _MOST_OUTPUT_BYTES // self.pool.used_bytes
            self._clear()
            self.pool = Pool()

    def _clear(self) -> None:
        self.graphs.clear()
        self._num_operators = 0

    def _give_up(self, reason: str) -> None:
        _LOGGER.info("decode steps are not recorded, so they take more time at small batches: %s", reason)
        self._is_eager = True
        self._clear()
        self.pool = Pool()
