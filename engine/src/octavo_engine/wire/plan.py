"""The scheduler's decisions (`StepPlan`) and the runner's results (`StepResult`) as plain, serialisable data.

The order of work in a step, on which the scheduler relies: `swap_out`, `swap_in`, `copies`, `dropped_images`, `encode`,
forward pass, sampling. A block that `swap_out` frees may thus be written in the same step.

Lengths: a sequence has `token_ids`; KV exists for its first `start` tokens; a `SeqStep` computes tokens
[start, start + num_tokens) and, if `sample`, draws the next token from the logits of the last of them, or takes the
vector of a sequence with `pooling` from its last hidden row. Drafts follow
these tokens: the step computes them, too, and draws tokens up to and including the first that differs from its draft.
With a draft model they are placeholders, which the runner replaces by drafts.
"""

import math
from dataclasses import dataclass, field

from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import ErrorInfo, ImageSpan, TokenLogprobs
from octavo_engine.wire.sampling import SamplingParams

BlockId = int
SeqId = int


@dataclass(slots=True, kw_only=True)
class NewSeq:
    """A sequence that the runner does not hold: new, resumed after a preemption, or forked.

    `token_ids` are all tokens so far (prompt, then output); sampling is keyed by (seed, position), so the runner needs
    no other state to continue a stream.
    """

    seq_id: SeqId
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int = 0
    eos_token_id: int | None = None
    adapter: str = ""
    grammar: str | None = None
    pooling: PoolingParams | None = None
    images: tuple[ImageSpan, ...] = ()


@dataclass(slots=True, kw_only=True)
class SeqStep:
    """One sequence's share of a step.

    `block_ids[g]` overwrites the table of KV group g from entry `table_start` on (append, or replace after a
    copy-on-write). `logits_from`: the sequence whose last logits this sequence samples from, with `num_tokens` 0 (a
    fork at the end of a shared prompt). `num_prompt_logprobs`: how many rows need prompt log-probabilities.
    """

    seq_id: SeqId
    start: int
    num_tokens: int
    sample: bool
    table_start: int = 0
    block_ids: list[list[BlockId]] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    logits_from: SeqId | None = None
    num_prompt_logprobs: int = 0

    @property
    def num_computed(self) -> int:
        return self.num_tokens + len(self.draft_token_ids)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The work of one step. Pairs of blocks are (source block, destination block)."""

    step_id: int
    seqs: list[SeqStep] = field(default_factory=list)
    new_seqs: list[NewSeq] = field(default_factory=list)
    dropped_seqs: list[SeqId] = field(default_factory=list)  # finished, aborted or preempted; dropped first
    swap_out: list[tuple[BlockId, BlockId]] = field(default_factory=list)  # device -> host
    swap_in: list[tuple[BlockId, BlockId]] = field(default_factory=list)  # host -> device
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)  # device -> device, copy-on-write
    dropped_images: list[bytes] = field(default_factory=list)  # digests of images whose rows are dropped
    encode: list[tuple[SeqId, int]] = field(default_factory=list)  # (sequence, index of its image)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_computed for s in self.seqs)

    @property
    def is_empty(self) -> bool:
        moves = self.swap_out or self.swap_in or self.copies
        return not (self.seqs or self.dropped_seqs or self.dropped_images or moves)


@dataclass(slots=True, kw_only=True)
class SeqResult:
    """0..k tokens sampled for one sequence (more than one only with accepted drafts).

    `prompt_logprobs`: one entry per requested row; the entry of row i is about the token at start + i + 1.
    `error`: only this sequence has failed (its logits are not finite, or its masks leave no token), without tokens.
    `embedding`: the vector of a sequence with `pooling`, as little-endian float32.
    """

    seq_id: SeqId
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: ErrorInfo | None = None
    embedding: bytes | None = None


@dataclass(slots=True, kw_only=True)
class StepCosts:
    """Costs that the runner measures; inputs of `Scheduler.step`, so that its decisions can be replayed.

    0 means not measured yet. A step takes `step_s`, plus `chunk_s` of each of its sequences. With a draft model, the
    times are sums over both models, because both compute every prompt; `draft_token_s` and `draft_step_s` are the draft
    model's part of the sums.
    """

    prefill_token_s: float = 0.0  # seconds to compute one token, without its attention to earlier tokens
    swap_block_s: float = 0.0  # seconds to move one block one way
    context_token_s: float = 0.0  # seconds of a token's attention to one earlier token
    step_s: float = 0.0  # seconds of a step that do not depend on its tokens, such as the passage over the weights
    logprob_row_s: float = 0.0  # seconds of a prompt token's log-probabilities, besides `chunk_s`
    draft_token_s: float = 0.0
    draft_step_s: float = 0.0
    image_token_s: float = 0.0  # seconds to encode an image, per token; not included in the other times

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Return the seconds that tokens [start, start + num_tokens) of one sequence add to a step."""
        return num_tokens * (self.prefill_token_s + self.context_token_s * (start + num_tokens / 2))

    def tokens_within(self, start: int, seconds: float) -> int:
        """Return how many tokens from `start` on take at most `seconds`: the inverse of `chunk_s`.

        `prefill_token_s` must have been measured.
        """
        if seconds <= 0:
            return 0
        first_s = self.prefill_token_s + self.context_token_s * start
        exact = 2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * self.context_token_s * seconds))
        return int(exact + 1e-6)  # rounding errors must not cost a token


@dataclass(slots=True, kw_only=True)
class StepResult:
    step_id: int
    seqs: list[SeqResult] = field(default_factory=list)
    costs: StepCosts = field(default_factory=StepCosts)
    encode_s: float = 0.0  # seconds of encoding images since the previous result
    stage_bytes: tuple[int, int] = (
        0,
        0,
    )  # sent to the next stage and received from the last one since the previous result
    error: str | None = None  # the whole step failed: every sequence in it ends with "error"
