"""Arguments that are not supported together with several ranks."""

from typing import Any

import pytest
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import StartupError

DRAFT_MODEL = {"model": "small", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_an_argument_that_ranks_do_not_support_is_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(
        StartupError, match=f"tensor_parallel_size=2 is not supported with {name}.*leave one of them out"
    ):
        resolve_config(tensor_parallel_size=2, **arguments)
    assert resolve_config(tensor_parallel_size=1, **arguments).tensor_parallel_size == 1


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft model"])
def test_drafts_are_supported(speculation: dict[str, Any]) -> None:
    assert resolve_config(tensor_parallel_size=2, speculative_config=speculation).tensor_parallel_size == 2


@pytest.mark.parametrize("size", [0, -1, 4096])
def test_a_number_of_ranks_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(StartupError, match=f"tensor_parallel_size must be between 1 and 1024, got {size}"):
        resolve_config(tensor_parallel_size=size)


@pytest.mark.parametrize("seconds", [0, 86401])
def test_a_timeout_out_of_range_is_refused(seconds: int) -> None:
    with pytest.raises(StartupError, match=f"distributed_timeout_seconds must be between 1 and 86400, got {seconds}"):
        resolve_config(distributed_timeout_seconds=seconds)
