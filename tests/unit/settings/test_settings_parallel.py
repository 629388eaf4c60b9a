"""Arguments that are not supported together with several ranks."""

from typing import Any

import pytest
from octavo_engine.offline.llm import LLM
from octavo_engine.settings.config import ranks_per_host, steps_ahead
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"nnodes": 3, "tensor_parallel_size": 4}, "nnodes=3 does not divide the number of ranks, 4"),
        ({"nnodes": 2, "tensor_parallel_size": 1}, "nnodes=2 does not divide the number of ranks, 1"),
        ({"nnodes": 2, "node_rank": 2, "headless": True}, "node_rank=2 must be below nnodes=2"),
        ({"node_rank": 1, "headless": True, "tensor_parallel_size": 1}, "node_rank=1 must be below nnodes=1"),
        ({"nnodes": 2, "headless": True}, "headless is for hosts other than the first"),
        ({"nnodes": 2, "node_rank": 1}, "node_rank=1 needs headless"),
        ({"nnodes": 0}, "nnodes must be between 1 and 1024, got 0"),
        ({"master_port": 0}, "master_port must be between 1 and 65535, got 0"),
        ({"node_rank": -1}, "node_rank must be between 0 and 1023, got -1"),
    ],
    ids=str,
)
def test_hosts_that_do_not_fit_the_ranks_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        resolve_config(**{"tensor_parallel_size": 2} | arguments)


def test_hosts_divide_the_ranks() -> None:
    config = resolve_config(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=2, node_rank=1, headless=True)
    assert ranks_per_host(config) == 3


def test_a_script_is_the_first_host_only() -> None:
    with pytest.raises(StartupError, match="headless: a script runs on the first host: run `octavo serve --headless`"):
        LLM("a model", tensor_parallel_size=2, nnodes=2, node_rank=1, headless=True)
