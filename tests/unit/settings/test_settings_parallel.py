"""Arguments that are not supported together with several ranks."""

from typing import Any

import pytest
from octavo_engine.settings.config import steps_ahead
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import StartupError

DRAFT_MODEL = {"model": "small", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_steps_ahead_are_refused_with_ranks(kind: str) -> None:
    name = f"{kind}_parallel_size"
    with pytest.raises(StartupError, match=f"{name}=2 is not supported with async_scheduling.*leave one of them out"):
        resolve_config(**{name: 2}, async_scheduling=True)
    resolve_config(**{name: 1}, async_scheduling=True)
    assert steps_ahead(resolve_config(**{name: 2}), "cuda") == 0


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft model"])
def test_drafts_are_supported(speculation: dict[str, Any]) -> None:
    assert resolve_config(tensor_parallel_size=2, speculative_config=speculation).tensor_parallel_size == 2


@pytest.mark.parametrize("size", [0, -1, 4096])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_number_of_ranks_out_of_range_is_refused(name: str, size: int) -> None:
    with pytest.raises(StartupError, match=f"{name} must be between 1 and 1024, got {size}"):
        resolve_config(**{name: size})


@pytest.mark.parametrize("seconds", [0, 86401])
def test_a_timeout_out_of_range_is_refused(seconds: int) -> None:
    with pytest.raises(StartupError, match=f"distributed_timeout_seconds must be between 1 and 86400, got {seconds}"):
        resolve_config(distributed_timeout_seconds=seconds)
