"""Load generator, oracle and goals of the benchmark over real replicas, tested over a scripted server."""

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
        for name in ("replica_workloads", "replica_load", "replica_results", "table"):
            if name not in before:
                sys.modules.pop(name, None)


def test_a_workload_is_reproducible_and_has_the_requested_rate(modules: Any) -> None:
    for workload in modules("replica_workloads").WORKLOADS:
        turns = workload.requests(400, 10.0, 1)
        assert turns == workload.requests(400, 10.0, 1) != workload.requests(400, 10.0, 2)
        assert turns[-1].at_s == pytest.approx(400 / (10 * workload.load), rel=0.25)
        per_conversation = [sum(t.conversation == c for t in turns) for c in range(max(t.conversation for t in turns))]
        assert max(per_conversation) == workload.turns
        assert len({turn.system for turn in turns}) == workload.num_systems


def test_the_oracle_counts_whole_blocks_of_earlier_prompts(modules: Any) -> None:
    load = modules("replica_load")
    first = list(range(50))
    known = set(load.chain(first))
    assert len(known) == 3
    assert load.num_known(first, known) == 3
    assert load.num_known(first[:48], known) == 2  # the last token is always computed
    assert load.num_known([*first[:20], 99, *first[21:]], known) == 1
    assert load.num_known([99, *first[1:]], known) == 0


async def test_turns_contain_earlier_answers_and_the_oracle_finds_them(modules: Any, tmp_path: Path) -> None:
    load, workloads = modules("replica_load"), modules("replica_workloads")
    turns = [workloads.Turn(0.0, i % 2, "you are", f"question {i}") for i in range(6)]
    engine = ScriptedClient(write_byte_model(tmp_path))
    engine.num_cached_tokens = 16
    async with serving(engine) as served:
        outcome = await load.run_load(turns, MODEL, itertools.repeat(served.url).__next__, "test")
        oracle = await load.oracle_tokens(outcome, served.url)
        assert outcome.num_errors == 0
        assert outcome.cached_tokens == 6 * 16
        last = outcome.records[-1]
        assert [m["role"] for m in last.messages] == ["system", *("user", "assistant") * 2, "user"]
        assert last.messages[2]["content"] == "Hello, world!"[: workloads.MAX_TOKENS]
        assert last.ttft_s > 0
        assert 0.5 * outcome.prompt_tokens < oracle < outcome.prompt_tokens
        engine.fail_at = 0
        failed = await load.run_load(turns[:1], MODEL, itertools.repeat(served.url).__next__, "test")
        assert failed.num_errors == 1


def result(modules: Any, **fields: Any) -> Any:
    figures = {"oracle_share": 0.97, "oracle_tokens": 100, "cached_tokens": 97, "hit_rate": 0.7, "ttft_mean_s": 1.0}
    figures |= {"ttft_p50_s": 1.0, "ttft_p99_s": 1.0, "goodput": 1.0, "num_errors": 0, "skew": 1.2}
    return modules("replica_results").Result(**{"policy": "octavo", **figures, **fields})


def test_the_verdicts_name_every_missed_goal(modules: Any) -> None:
    results = {
        "multi-turn": {
            "octavo": result(modules),
            "octavo x2": result(modules, hit_rate=0.65),
            "round robin": result(modules, ttft_mean_s=2.0),
            "sglang": result(modules, ttft_mean_s=0.5),
        },
        "hot prefix": {"octavo": result(modules, skew=1.4)},
        "eviction pressure": {"octavo": result(modules, evicted_blocks=5, expected_error=0.02)},
    }
    verdicts = modules("replica_results").verdicts(results)
    assert [what for what, _, _, word in verdicts if word == "missed"] == [
        "multi-turn: mean TTFT / sglang",
        "multi-turn: hit rate of two routers off by",
        "hot prefix: busiest / mean replica",
        "pressure: expected off by",
    ]
    assert len(verdicts) == 10


def test_expected_tokens_are_compared_only_with_reported_ones(modules: Any) -> None:
    decisions = [
        {"expected_tokens": 32, "cached_tokens": 32, "rung": "exact"},
        {"expected_tokens": 48, "cached_tokens": 16, "rung": "exact"},
        {"expected_tokens": 16, "cached_tokens": None, "rung": "hash"},
    ]
    found = modules("replica_results")._predictions(decisions)
    assert found["expected_error"] == pytest.approx(32 / 48)
    assert found["rungs"] == {"exact": 2, "hash": 1}
