"""The router's simulator at small size: laws under every policy, reproducible runs, cache hits of Octavo's policy."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
        for name in [n for n in sys.modules if n.partition(".")[0] in ("router_sim", "router_simulator", "table")]:
            del sys.modules[name]


def case(
    load: Any, policy: str, workload: str, *, rate: float = 12.0, replicas: int = 3, seed: int = 0, **more: int
) -> Any:
    study = load("router_sim.study")
    sizes = {"replicas": replicas, "requests": 150, "seed": seed, **more}
    setting = study.Setting(workload=workload, hardware="a10g-7b", **sizes)
    return study.Case(setting=setting, policy=policy, load=0.5, rate=rate)


def policies() -> list[str]:
    names = ["octavo", "random", "round-robin", "least-load", "chwbl", "sglang", "llm-d", "llm-d-exact"]
    return [*names, "loadaware", "dynamo", "aware"]


def test_every_policy_is_tested(load: Any) -> None:
    assert policies() == [*load("router_sim.policies").POLICIES]


@pytest.mark.parametrize("policy", policies())
def test_every_request_ends_once_and_frees_its_blocks(load: Any, policy: str) -> None:
    found = load("router_sim.study").run(case(load, policy, "chat"))  # checks the laws itself
    assert found.errors == 0
    assert 0 < found.hit_rate <= found.oracle_rate


@pytest.mark.parametrize("workload", ["shared", "chat", "agents", "unshared", "hot", "siblings"])
def test_octavos_policy_hits_no_less_than_round_robin(load: Any, workload: str) -> None:
    run = load("router_sim.study").run
    ours, other = run(case(load, "octavo", workload)), run(case(load, "round-robin", workload))
    assert ours.requests == other.requests
    assert ours.hit_rate >= other.hit_rate
    if workload in ("shared", "chat"):
        assert ours.hits_of_oracle >= 0.9


def test_expected_hits_are_found_while_blocks_are_evicted(load: Any) -> None:
    found = load("router_sim.study").run(case(load, "octavo", "chat", rate=6.0, blocks=400))
    assert found.hits_of_oracle < 0.5  # the other blocks were evicted
    assert found.expected_error is not None
    assert found.expected_error <= 0.01


def test_two_independent_routers_hit_as_much_as_one(load: Any) -> None:
    run = load("router_sim.study").run
    one, two = (run(case(load, "octavo", "shared", rate=16.0, requests=400, routers=routers)) for routers in (1, 2))
    assert one.hits_of_oracle >= 0.95
    assert two.hit_rate >= 0.99 * one.hit_rate


def test_results_are_medians_over_seeds(load: Any) -> None:
    figures = load("router_sim.figures")
    run = load("router_sim.study").run
    runs = [run(case(load, "random", "unshared", seed=seed)) for seed in range(3)]
    assert figures.medians(runs).ttft_mean_s == sorted(run.ttft_mean_s for run in runs)[1]
    assert figures.medians(runs).expected_error is None


def test_equal_seeds_give_equal_runs(load: Any) -> None:
    run = load("router_sim.study").run
    assert run(case(load, "octavo", "agents")) == run(case(load, "octavo", "agents"))
    assert run(case(load, "octavo", "agents")) != run(case(load, "octavo", "agents", seed=1))


def test_full_replicas_refuse_and_every_request_still_ends(load: Any) -> None:
    found = load("router_sim.study").run(case(load, "random", "unshared", rate=3000.0, replicas=1))
    assert found.errors == found.requests - 128
    assert found.goodput < found.offered_rate


def test_the_oracle_counts_answers_only_once_they_have_ended(load: Any) -> None:
    oracle_of, world = load("router_sim.oracle"), load("router_sim.world")
    request_of = load("router_sim.workloads").Request

    def request(number: int, prompt: bytes, answer: bytes = b"") -> Any:
        return request_of(number=number, at_s=0.0, prompt=prompt, answer=answer, after=None, pause_s=0.0)

    oracle = oracle_of.Oracle()
    first, second = request(0, bytes(range(40)), bytes(24)), request(1, bytes(range(40)) + bytes(40))
    assert oracle.count_findable(world.policy_request(first)) == 0
    assert oracle.count_findable(world.policy_request(second)) == 32
    oracle.add_answer(first)
    assert oracle.count_findable(world.policy_request(request(2, bytes(range(40)) + bytes(23) + b"x" * 40))) == 48
    assert (
        oracle.count_findable(world.policy_request(request(3, bytes(range(32))))) == 31
    )  # the last token is always computed


def test_the_command_prints_and_saves_its_results(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "--workload siblings --policy octavo random --load 0.5 --replicas 2 --requests 64 --quiet"
    saved = tmp_path / "found.json"
    load("router_simulator").main([*command.split(), "--json", str(saved), "--plot", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "siblings, 2 replicas" in shown
    runs = json.loads(saved.read_text())["runs"]
    assert [run["case"]["policy"] for run in runs] == ["octavo", "random"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_a_drained_replica_finishes_its_requests_and_gets_no_new_ones(load: Any) -> None:
    hardware, octavo = load("router_sim.hardware").HARDWARE["a10g-7b"], load("router_sim.octavo").Octavo
    world = load("router_sim.world").World(hardware, 3, octavo, routers=2)
    running: list[int] = []

    def choose(world: Any) -> int:
        running.append(world.loads[1].now)
        return 1

    world.drain_at(6.0, choose)
    world.run(load("router_sim.workloads").WORKLOADS["agents"].requests(rate=12.0, count=150, replicas=3, seed=0))
    world.check()
    sent = [outcome for outcome in world.outcomes.values() if outcome.replica == 1]
    assert running[0] > 0
    assert sum(outcome.ended_s > 6.0 for outcome in sent) == running[0]
    assert max(outcome.arrived_s for outcome in sent) < 6.0
    assert not any(outcome.is_refused for outcome in world.outcomes.values())
    for view in world.views:
        assert [(r.state, r.blocks.state) for r in view.replicas] == [
            ("exact", "exact"),
            ("gone", "broken"),
            ("exact", "exact"),
        ]
