"""`Sequence`: one stream of tokens; `SequenceGroup`: the sequences of one request.

States: waiting -admit-> running -preempt-> preempted -admit-> running; any state -finish-> finished, which is final and
reached once per index. A sequence that needs a grammar, images or an adapter starts as deferred -prepared-> waiting. A
waiting or preempted sequence is deferred again if it needs images that are not prepared. `computed` counts the tokens
whose KV exists once every issued plan has run; tokens [computed, length) remain to be computed. Plans in flight sample
the last `pending` of these tokens, which are not known yet. With `steps_ahead`, the next decode step of a sequence may
be planned before its newest token is known; otherwise the sequence waits for this token.

A request with n > 1 starts as one sequence, which computes the prompt once and stands for all `indices` (outputs). In
the step that computes the last prompt token, it keeps the first index, and the others are forked from it.
"""

from dataclasses import dataclass, field
from typing import Literal

from octavo_engine.core.tenants import Tenant
from octavo_engine.wire.plan import BlockId, SeqId
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.records import EngineRequest, Timing, TokenLogprobs
from octavo_engine.wire.sampling import SamplingParams

Status = Literal["deferred", "waiting", "running", "preempted", "finished"]
Key = tuple[int, float, int, int]
NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one request. `live`: the unfinished ones. `next_index`: index of the next forked output.

    `num_cached`: prompt tokens in the cache when the first sequence began to run; -1: none has run. `tenant`: set when
    a sequence enters the queue. `images_from`: images that end after this position are prepared or, while a sequence is
    deferred, being prepared.
    """

    request: EngineRequest
    next_index: int
    tenant: Tenant = field(init=False)
    num_cached: int = -1
    images_from: int = 0
    live: list["Sequence"] = field(default_factory=list)

    @property
    def is_deferred(self) -> bool:
        return any(seq.status == "deferred" for seq in self.live)

    def needs_images(self, num_cached: int) -> bool:
        """Return whether a sequence that computes all tokens from `num_cached` on must wait for images."""
        images = self.request.images
        return any(num_cached < image.end <= self.images_from for image in images) or (
            bool(images) and self.is_deferred
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    seq_id: SeqId
    group: SequenceGroup
    indices: list[int]  # outputs that this sequence computes: several only before the fork
    key: Key  # sequences with smaller keys are served first and preempted last
    token_ids: list[int]
    limit: int  # largest len(token_ids)
    arrival_s: float
    num_prompt: int
    request_id: str
    min_total: int  # while len(token_ids) is below it, no token stops the sequence
    eos_token_id: int = NO_TOKEN
    stop_token_ids: frozenset[int] = frozenset()
    status: Status = "waiting"
    computed: int = 0
    table: list[BlockId] = field(default_factory=list)
    num_sent: int = 0  # entries of `table` that were sent to the runner
    announced: bool = False  # whether the sequence was sent to the runner
    root_hash: bytes = b""
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, computed when needed
    num_registered: int = 0  # leading entries of `table` that are registered in the pool by hash
    in_flight: int = 0  # plans issued and not yet committed
    pending: int = 0  # tokens that plans in flight sample: they follow `token_ids`, but are not known yet
    drafts: list[int] = field(default_factory=list)
    num_drafts: int = 0  # drafts scheduled, after cuts, when some were last proposed
    saved: int = 0  # tokens computed when it was preempted
    private_blocks: range = range(0)  # positions saved for this sequence alone in the host tier
    num_cached: int = -1  # prompt tokens found in the cache when it first ran; -1: it has never run
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected so far; None if not requested or sent already
    scheduled_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.group.request.params

    @property
    def pooling(self) -> PoolingParams | None:
        return self.group.request.pooling

    @property
    def adapter(self) -> str:
        return self.group.request.adapter

    @property
    def seed(self) -> int:
        return (self.params.seed or 0) + self.indices[0]

    @property
    def length(self) -> int:
        """Number of tokens of the sequence once every issued plan has run."""
        return len(self.token_ids) + self.pending

    def num_own_blocks(self, block_size: int) -> int:
        """Return the number of blocks that only this sequence uses: blocks neither found in the cache nor shared with
        siblings."""
        shared = self.num_prompt if self.key[-1] else max(self.num_cached, 0)
        return max(len(self.table) - shared // block_size, 0)

    @property
    def needs_newest(self) -> bool:
        """True if the runner needs the newest token on the host to sample the next one."""
        return self.group.request.grammar is not None or self.params.masks_by_newest

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def timing(self, now: float) -> Timing:
        if self.num_cached < 0:
            return Timing(queue_s=now - self.arrival_s)
        first = self.first_token_s if self.num_output else now
        return Timing(
            queue_s=self.scheduled_s - self.arrival_s,
            prefill_s=first - self.scheduled_s,
            decode_s=now - first,
            inference_s=now - self.scheduled_s,
        )

    def check(self, block_size: int) -> None:
        assert self.indices, f"sequence {self.seq_id} stands for no output"
        assert 0 <= self.pending <= self.in_flight
        assert self.in_flight or self.computed < len(self.token_ids), f"sequence {self.seq_id} has nothing to do"
        assert self.num_registered <= min(len(self.hashes), len(self.token_ids) // block_size)
        if self.status == "running":
            assert self.num_sent <= len(self.table)
            assert len(self.table) * block_size >= self.computed
        else:
            assert not self.table
            assert not self.announced


def new_sequence(request: EngineRequest, *, seq_id: SeqId, key: Key, max_len: int, now: float) -> Sequence:
    """Create the first sequence of a request; it stands for all outputs. `max_len`: most tokens of a sequence."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    limit = max_len if params.max_tokens is None else min(max_len, num_prompt + params.max_tokens)
    shaped = request.grammar is not None  # the grammar's masks then decide when an end token is allowed
    stops_at_eos = request.eos_token_id is not None and (shaped or not params.ignore_eos)
    seq = Sequence(
        seq_id=seq_id,
        group=SequenceGroup(request, next_index=params.n),
        indices=list(range(params.n)),
        key=key,
        token_ids=list(request.prompt_token_ids),
        limit=limit,
        arrival_s=now,
        num_prompt=num_prompt,
        request_id=request.request_id,
        min_total=num_prompt + (0 if shaped else params.min_tokens),
        eos_token_id=request.eos_token_id if stops_at_eos and request.eos_token_id is not None else NO_TOKEN,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
    )
    seq.group.live.append(seq)
    return seq


def forked_sequence(parent: Sequence, *, seq_id: SeqId, index: int, computed: int) -> Sequence:
    """Create a sibling with the parent's tokens, without blocks; `KVCache.fork` shares the parent's blocks."""
    child = Sequence(
        seq_id=seq_id,
        group=parent.group,
        indices=[index],
        key=(*parent.key[:3], index),
        token_ids=list(parent.token_ids),
        limit=parent.limit,
        arrival_s=parent.arrival_s,
        num_prompt=parent.num_prompt,
        request_id=parent.request_id,
        min_total=parent.min_total,
        eos_token_id=parent.eos_token_id,
        stop_token_ids=parent.stop_token_ids,
        computed=computed,
        root_hash=parent.root_hash,
        hashes=list(parent.hashes),
        num_cached=parent.num_cached,
        scheduled_s=parent.scheduled_s,
        first_token_s=parent.first_token_s,
    )
    child.group.live.append(child)
    return child
