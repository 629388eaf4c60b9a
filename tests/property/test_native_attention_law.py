"""A law of native attention: after each history of a sequence, its rows have the bits of the whole prompt."""

import pytest
import torch
from octavo_engine.ops import native_attention
from octavo_testing.attention_history import SPECS, check_histories, follow, start
from octavo_testing.kernel_levels import levels_to_test

BEST = levels_to_test()[0]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@TYPES
def test_every_history_gives_the_bits_of_the_whole_prompt(dtype: torch.dtype) -> None:
    check_histories(BEST, dtype, 300, 600, 5)


@TYPES
def test_the_law_finds_parts_that_depend_on_the_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of tiles that cuts keys elsewhere, where it divides a sequence, changes bits."""
    monkeypatch.setattr(native_attention, "PART_KEYS", 128)
    history = start(SPECS[0], BEST, dtype, 16, 400, 0)
    with pytest.raises(AssertionError, match="bits of rows"):
        follow(history, [("chunk", 70, 0, 2)])
