"""Penalties by counts on the device change logits as those by counts on the host do, bit for bit."""

import numpy as np
import pytest
import torch
from octavo_engine.ops import triton_devices
from octavo_engine.sampling.logit_edits import PenaltyCounts, TokenCounts, apply_penalties
from octavo_engine.wire.sampling import SamplingParams

VOCAB, SLOTS = 70, 3


@pytest.mark.parametrize("devices", [set[str](), {"cpu"}], ids=["torch", "kernel"])
@pytest.mark.parametrize("known", [True, False], ids=["known tokens", "unknown tokens"])
def test_logits_equal_those_of_counts_on_the_host(
    devices: set[str], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are used again; sequences grow, stay, shrink, and are counted from the middle of their output."""
    monkeypatch.setattr(triton_devices, "DEVICES", devices)
    chance = np.random.default_rng(3)
    newest = torch.zeros(SLOTS, dtype=torch.int64)
    counts = PenaltyCounts(newest, VOCAB, lambda values: values.clone())
    seqs = {}
    for turn in range(40):
        slot = turn % SLOTS
        if turn < SLOTS or chance.random() < 0.1:
            repetition, frequency, presence = chance.choice([0.8, 1.0, 1.3]), *chance.uniform(-2, 2, 2)
            params = SamplingParams(
                repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
            )
            prompt = int(chance.integers(1, 6))
            tokens = chance.integers(0, 12, size=60).astype(np.int32)
            seqs[slot] = (TokenCounts(params, prompt), tokens, prompt + int(chance.choice([0, 0, 5])))
        seq, tokens, length = seqs[slot]
        logits = torch.from_numpy(chance.normal(size=(2, VOCAB)).astype(np.float32))
        want = logits.clone()
        apply_penalties(want, [1], [TokenCounts(seq.params, seq.num_prompt_tokens).penalty(tokens, length, 0)])
        seen = tokens.copy()
        if not known and length > seq.num_prompt_tokens:
            newest[slot], seen[length - 1] = int(tokens[length - 1]), -1
        counts.apply(logits, [counts.entry(1, slot, seq, seen, length)])
        assert logits.numpy().tobytes() == want.numpy().tobytes()
        seqs[slot] = (seq, tokens, max(seq.num_prompt_tokens, length + int(chance.choice([1, 1, 1, 1, 0, -3]))))


def test_a_count_stops_at_the_largest_number_of_16_bits() -> None:
    counts = PenaltyCounts(torch.zeros(1, dtype=torch.int64), VOCAB, lambda values: values)
    tokens = np.full(40_000, 7, dtype=np.int32)
    seq = TokenCounts(SamplingParams(frequency_penalty=1.0), 1)
    for length in (39_999, 40_000):
        logits = torch.zeros(1, VOCAB)
        counts.apply(logits, [counts.entry(0, 0, seq, tokens, length)])
        assert logits[0, 7] == -32767
        assert not logits[0, 8]


def test_memory_is_allocated_for_the_first_penalty() -> None:
    counts = PenaltyCounts(torch.zeros(2, dtype=torch.int64), VOCAB, lambda values: values)
    assert counts._counts is None
    seq = TokenCounts(SamplingParams(presence_penalty=1.0), 1)
    counts.apply(torch.zeros(1, VOCAB), [counts.entry(0, 1, seq, np.array([3], dtype=np.int32), 1)])
    assert counts._counts is not None
    assert (counts._counts.dtype, counts._counts.shape) == (torch.int16, (2, VOCAB))
