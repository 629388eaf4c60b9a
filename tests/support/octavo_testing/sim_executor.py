"""A model-free executor that carries out plans on a fake KV memory and checks that they were sound.

Each slot of each block holds the chain of the token written there: a number that depends on every token of the
sequence up to it, and on the images of which these tokens are. The executor works in the documented order (out, in,
copies, forward), each list as one batch, reads before writes. Before a sequence samples, every position of its table
must hold exactly its own chain, so that aliasing, a missing copy-on-write, a stale or misplaced swap, or a wrong prefix
hit is detected. The next token depends only on the chain and the seed, so that the output of a request must not depend
on other requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo_engine.wire.plan import NewSeq, SeqResult, SeqStep, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, FinishReason, ImageSpan, TokenLogprobs

VOCAB = 50
Block = list[int]
EMPTY = -1


def chains_of(token_ids: list[int], *, first: int = 0, before: int = 0, images: Sequence[ImageSpan] = ()) -> list[int]:
    """Return the chain of each token from position `first` on, given the chain before it."""
    chains, chain = [], before
    rows = {
        position: (int.from_bytes(i.digest[:4], "little"), position - i.start)
        for i in images
        for position in range(i.start, i.end)
    }
    for position, token in enumerate(token_ids[first:], start=first):
        chain = hash((chain, token, rows.get(position, 0), 7))
        chains.append(chain)
    return chains


def next_token(chain: int, seed: int) -> int:
    return hash((chain, seed, 11)) % VOCAB


def expected_output(
    request: EngineRequest, *, index: int = 0, max_len: int, start_from: list[int] | None = None
) -> tuple[list[int], FinishReason, int | None]:
    """Return the tokens, finish reason and stop reason that output `index` must get.

    `start_from`: the tokens at which the output was forked. Default: the prompt.
    """
    params = request.params
    token_ids = list(request.prompt_token_ids if start_from is None else start_from)
    first, num_prompt = len(token_ids), len(request.prompt_token_ids)
    chain = chains_of(token_ids, images=request.images)[-1]
    while True:
        token = next_token(chain, (params.seed or 0) + index)
        token_ids.append(token)
        chain = chains_of([token], before=chain)[0]
        num_output = len(token_ids) - num_prompt
        if num_output >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return token_ids[first:], "stop", None
            if token in (params.stop_token_ids or ()):
                return token_ids[first:], "stop", token
        if num_output >= (params.max_tokens or max_len) or len(token_ids) >= max_len:
            return token_ids[first:], "length", None


@dataclass(slots=True)
class SimSeq:
    new: NewSeq
    token_ids: list[int]
    chains: list[int]
    table: list[int] = field(default_factory=list)

    def push(self, token: int) -> None:
        self.token_ids.append(token)
        self.chains += chains_of([token], before=self.chains[-1])


class SimExecutor:
    def __init__(self, *, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device: list[Block] = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.host: list[Block] = [[EMPTY] * block_size for _ in range(num_host_blocks)]
        self.seqs: dict[int, SimSeq] = {}
        self.rows: dict[bytes, int] = {}  # images with rows, and their lengths
        self.most_rows = self.num_encoded = 0
        self.tokens_computed = 0
        self.has_failed = False

    def fail(self) -> None:
        """Lose all memory. Later plans may drop a sequence a second time."""
        self.has_failed = True
        for memory in (self.device, self.host):
            memory[:] = [[EMPTY] * self.block_size for _ in memory]

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.dropped_seqs:
            assert seq_id in self.seqs or self.has_failed, f"sequence {seq_id} dropped twice"
            self.seqs.pop(seq_id, None)
        for new in plan.new_seqs:
            assert new.seq_id not in self.seqs, f"sequence {new.seq_id} announced twice"
            self.seqs[new.seq_id] = SimSeq(new, list(new.token_ids), chains_of(new.token_ids, images=new.images))
        _move(self.device, self.host, plan.swap_out)
        _move(self.host, self.device, plan.swap_in)
        assert not {src for src, _ in plan.copies} & {dst for _, dst in plan.copies}, "a copy reads what another writes"
        _move(self.device, self.device, plan.copies)
        self._encode(plan)
        drafts = self._write(plan)
        for step in plan.seqs:
            self._verify(step, drafts.get(step.seq_id, []))
        return StepResult(step_id=plan.step_id, seqs=[self._result(plan, step) for step in plan.seqs])

    def _encode(self, plan: StepPlan) -> None:
        """Make the rows of images. A chunk may have no token of an image without rows."""
        for key in plan.dropped_images:
            assert key in self.rows or self.has_failed, "an image without rows is dropped"
            self.rows.pop(key, None)
        for seq_id, index in plan.encode:
            new = self.seqs[seq_id].new
            key = new.images[index].digest
            assert key not in self.rows, "an image with rows is encoded again"
            self.rows[key] = new.images[index].length
        self.num_encoded += len(plan.encode)
        self.most_rows = max(self.most_rows, sum(self.rows.values()))
        for step in plan.seqs:
            new, end = self.seqs[step.seq_id].new, step.start + step.num_tokens
            keys = {i.digest for i in new.images if i.start < end and step.start < i.end}
            assert keys <= self.rows.keys(), "a chunk has tokens of an image without rows"

    def _write(self, plan: StepPlan) -> dict[int, list[int]]:
        """Write the chains of the forward pass; return the chains of each sequence's drafts."""
        drafts: dict[int, list[int]] = {}
        for step in plan.seqs:
            seq = self.seqs[step.seq_id]
            if step.block_ids:
                (entries,) = step.block_ids
                assert step.table_start <= len(seq.table), "a gap in the block table"
                seq.table[step.table_start :] = entries
        writers: dict[int, int] = {}
        for step in plan.seqs:
            seq = self.seqs[step.seq_id]
            end = step.start + step.num_tokens
            assert end <= len(seq.token_ids), "tokens that were not sampled yet"
            chains = seq.chains[step.start : end]
            if step.draft_token_ids:
                assert end == len(seq.token_ids)
                drafts[step.seq_id] = chains_of(step.draft_token_ids, before=seq.chains[-1])
                chains = chains + drafts[step.seq_id]
            self.tokens_computed += step.num_tokens
            for position, chain in enumerate(chains, start=step.start):
                block = seq.table[position // self.block_size]
                assert writers.setdefault(block, step.seq_id) == step.seq_id, f"block {block} has two writers"
                self.device[block][position % self.block_size] = chain
        return drafts

    def _check_block(self, seq: SimSeq, position: int, end: int) -> None:
        size = self.block_size
        expected = seq.chains[position * size : min((position + 1) * size, end)]
        found = self.device[seq.table[position]][: len(expected)]
        assert found == expected, f"sequence {seq.new.seq_id}: wrong KV in entry {position} of its table"

    def _verify(self, step: SeqStep, drafts: list[int]) -> None:
        seq = self.seqs[step.seq_id]
        end = step.start + step.num_tokens
        for position in range(-(-end // self.block_size)):
            self._check_block(seq, position, end)
        for position, chain in enumerate(drafts, start=end):
            assert self.device[seq.table[position // self.block_size]][position % self.block_size] == chain

    def _result(self, plan: StepPlan, step: SeqStep) -> SeqResult:
        seq = self.seqs[step.seq_id]
        result = SeqResult(seq_id=step.seq_id, token_ids=[])
        if step.num_prompt_logprobs:
            rows = range(step.start + 1, step.start + 1 + step.num_prompt_logprobs)
            result.prompt_logprobs = [TokenLogprobs([seq.token_ids[p]], [-1.0], 1) for p in rows]
        if not step.sample:
            return result
        assert step.start + step.num_tokens == len(seq.token_ids), "a sample from the middle"
        if step.logits_from is not None:
            source = next(s for s in plan.seqs if s.seq_id == step.logits_from)
            assert source.sample
            assert source.num_tokens
            assert self.seqs[source.seq_id].chains[: len(seq.chains)] == seq.chains
        else:
            assert step.num_tokens, "nothing to sample from"
        for draft in [*step.draft_token_ids, None]:
            token = next_token(seq.chains[-1], seq.new.seed)
            result.token_ids.append(token)
            seq.push(token)
            if token != draft:
                break
        if seq.new.params.logprobs is not None:
            result.logprobs = [TokenLogprobs([token], [-1.0], 1) for token in result.token_ids]
        return result


def _move(source: list[Block], target: list[Block], pairs: list[tuple[int, int]]) -> None:
    assert len({dst for _, dst in pairs}) == len(pairs), "two writes to one place"
    for (_, dst), content in zip(pairs, [list(source[src]) for src, _ in pairs], strict=True):
        target[dst] = content
