"""Random histories of a sequence in the native attention kernel, whose rows must have the bits of the whole prompt.

A history is made of chunks, prefix hits, preemptions, drafts of which some are rejected, and forks, in batches with
other sequences, on one to three threads, in blocks that earlier owners left full of NaN.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cpu_level import Level
from octavo_engine.ops.native_attention import NativeBackend
from octavo_engine.ops.native_library import load_library
from torch import Tensor

from octavo_testing.attention_cases import make_spec, random_qkv

SPECS = [
    make_spec(heads=3, kv_heads=1, dim=32),
    make_spec(heads=4, kv_heads=2, dim=48, window=300),
    make_spec(heads=2, kv_heads=2, dim=37, window=33),
    make_spec(heads=8, kv_heads=1, dim=16, softcap=5.0),
]
STEPS = st.tuples(
    st.sampled_from(["chunk", "decode", "decode", "draft", "hit", "fork"]),
    st.integers(1, 70),  # tokens of the step, or the share of the sequence that a hit leaves
    st.integers(0, 63),  # other sequences
    st.integers(1, 3),  # threads
)


@dataclass
class History:
    """One sequence and its blocks. `computed`: tokens with KV."""

    backend: NativeBackend
    spec: AttentionSpec
    qkv: tuple[Tensor, Tensor, Tensor]
    wrong: tuple[Tensor, Tensor, Tensor]  # of rejected drafts
    expected: Tensor
    block: int
    crowd: list[int]  # the lengths of other sequences, whose one block is stale
    free: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0

    def run(self, accepted: int, rejected: int, others: int, threads: int) -> None:
        """Compute the next tokens and compare their outputs; drafts that are rejected later are behind them."""
        torch.set_num_threads(threads)
        end = self.computed + accepted
        while len(self.table) * self.block < end + rejected:
            self.table.append(self.free.pop())
        rows = [torch.cat([x[self.computed : end], y[:rejected]]) for x, y in zip(self.qkv, self.wrong, strict=True)]
        before, behind = self.crowd[: others // 2], self.crowd[others // 2 : others]
        padded = [torch.cat([x[: len(before)], y, x[: len(behind)]]) for x, y in zip(self.wrong, rows, strict=True)]
        batch = self.batch(before, accepted + rejected, behind)
        self.backend.begin_step(batch)
        out = self.backend.attend(self.spec, *padded, batch)[len(before) :][:accepted]
        differing = (out != self.expected[self.computed : end]).flatten(1).any(1).nonzero().flatten() + self.computed
        assert not len(differing), f"the bits of rows {differing.tolist()} differ"
        self.computed = end

    def batch(self, before: list[int], tokens: int, behind: list[int]) -> AttentionBatch:
        counts = torch.tensor([0, *[1] * len(before), tokens, *[1] * len(behind)])
        lens = [*before, self.computed + tokens, *behind]
        tables = torch.zeros(len(lens), len(self.table), dtype=torch.int32)
        tables[len(before)] = torch.tensor(self.table)
        slots = torch.full((int(counts.sum()),), -1)
        positions = torch.arange(self.computed, self.computed + tokens)
        own = torch.tensor(self.table)[positions // self.block] * self.block + positions % self.block
        slots[len(before) : len(before) + tokens] = own
        return AttentionBatch(
            query_start=counts.cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=tables,
            slots=slots,
            max_query_len=max(tokens, 1),
            max_seq_len=max(lens),
            num_keys=sum(lens),
        )

    def hit(self, kept: int) -> None:
        """Preempt the sequence, which finds `kept` blocks of its prefix in the cache again."""
        dropped = self.table[kept:]
        self.free = [*dropped, *self.free]
        self.table, self.computed = self.table[:kept], min(self.computed, kept * self.block)

    def fork(self) -> None:
        """Continue in copies of the blocks."""
        copies = [self.free.pop() for _ in self.table]
        self.backend.copy_blocks(list(zip(self.table, copies, strict=True)))
        self.free, self.table = [*self.table, *self.free], copies


def start(spec: AttentionSpec, level: Level, dtype: torch.dtype, block: int, tokens: int, seed: int) -> History:
    torch.set_num_threads(1)
    backend = NativeBackend(load_library("g++", level), [spec.kv], block, dtype)
    num_blocks = 4 * (-(-(tokens + 40) // block) + 2)
    backend.allocate(num_blocks)
    payload = torch.full((num_blocks, backend.bytes_per_block()), 0xFF, dtype=torch.uint8)
    backend.swap_in([(i, i) for i in range(num_blocks)], payload)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    crowd = torch.randint(1, block + 1, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
    qkv, wrong = (random_qkv(spec, n, dtype, seed=seed + i) for i, n in enumerate((tokens, 128)))
    history = History(backend, spec, qkv, wrong, torch.empty(0), block, crowd, order.tolist())
    prompt = max(1, tokens - 40)
    outputs = []
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens))]:
        history.table += [history.free.pop() for _ in range(-(-end // block) - len(history.table))]
        batch = history.batch([], end - begin, [])
        backend.begin_step(batch)
        outputs.append(backend.attend(spec, *(x[begin:end] for x in qkv), batch))
        history.computed = end
    history.expected = torch.cat(outputs)
    history.hit(0)
    return history


def follow(history: History, steps: list[tuple[str, int, int, int]]) -> None:
    """Run the steps, then decode to the end if tokens are left, by chunks of the last step's size."""
    tokens = len(history.expected)
    for kind, size, others, threads in steps:
        left = tokens - history.computed
        if kind == "fork":
            history.fork()
        elif kind == "hit" or not left:
            history.hit(len(history.table) * size // 70)
        else:
            accepted = min(left, size if kind == "chunk" else 1 + size % 5 if kind == "draft" else 1)
            history.run(accepted, size % 33 if kind == "draft" else 0, others, threads)
    _, size, others, threads = steps[-1]
    while history.computed < tokens:
        history.run(min(size + 10, tokens - history.computed), 0, others, threads)


def check_histories(level: Level, dtype: torch.dtype, least: int, most: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        spec=st.sampled_from(SPECS),
        block=st.sampled_from([16, 32, 64, 128]),
        tokens=st.integers(least, most),
        steps=st.lists(STEPS, min_size=1, max_size=40),
        seed=st.integers(0, 1 << 20),
    )
    def law(spec: AttentionSpec, block: int, tokens: int, steps: list[tuple[str, int, int, int]], seed: int) -> None:
        follow(start(spec, level, dtype, block, tokens, seed), steps)

    law()
