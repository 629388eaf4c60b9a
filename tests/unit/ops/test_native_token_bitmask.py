"""Token masks applied in C++ against the torch function, on sizes that are not multiples of a word."""

import numpy as np
import pytest
import torch
from octavo_engine.ops import token_bitmask
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference

NEVER = float("-inf")


def words_of(*allowed: set[int], vocab: int) -> torch.Tensor:
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), dtype=np.uint8)
    for row, ids in zip(bits, allowed, strict=True):
        row[list(ids)] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("keep", [apply_token_bitmask, apply_token_bitmask_reference])
def test_tokens_without_a_bit_cannot_be_chosen(keep) -> None:
    logits = torch.arange(3 * 70.0).view(3, 70)
    before = logits.clone()
    words = words_of({0, 31, 32, 69}, set(), vocab=70)
    keep(logits, torch.tensor([2, 0]), words)
    assert torch.isfinite(logits[2]).nonzero()[:, 0].tolist() == [0, 31, 32, 69]
    assert logits[2][[0, 31, 32, 69]].equal(before[2][[0, 31, 32, 69]])
    assert (logits[0] == NEVER).all()
    assert logits[1].equal(before[1])


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000, 49152])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernel_and_torch_agree(vocab: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    chance = torch.Generator().manual_seed(vocab)
    rows = torch.randperm(7, generator=chance)[:5]
    words = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=chance, dtype=torch.int64).int()
    words[1], words[2] = 0, -1
    wide = torch.randn(7, vocab + 3, generator=chance)
    ours, theirs = wide.clone()[:, :vocab], wide.clone()[:, :vocab]
    apply_token_bitmask(ours, rows, words)
    apply_token_bitmask_reference(theirs, rows, words)
    assert ours.equal(theirs)


def test_other_types_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 64, dtype=torch.bfloat16)
    apply_token_bitmask(logits, torch.tensor([0]), words_of({63}, vocab=64))
    assert torch.isfinite(logits[0]).nonzero()[:, 0].tolist() == [63]


def test_the_kernel_is_available() -> None:
    assert native_library() is not None
    assert token_bitmask.kernels_for(torch.zeros(1)) is native_library()
