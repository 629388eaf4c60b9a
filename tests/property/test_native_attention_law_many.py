"""The law of the native attention kernel at every level of this CPU, for many long histories."""

import pytest
import torch
from octavo_engine.ops.cpu_level import Level
from octavo_testing.attention_history import check_histories
from octavo_testing.kernel_levels import levels_to_test
from octavo_testing.run_length import LONG

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", levels_to_test(), ids=lambda level: level.name)
def test_every_long_history_gives_the_bits_of_the_whole_prompt(level: Level, dtype: torch.dtype) -> None:
    check_histories(level, dtype, 2, 1500, 1000 if LONG else 60)
