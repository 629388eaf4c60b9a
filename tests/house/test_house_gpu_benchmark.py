"""`benchmarks/gpu.sh` without a GPU: arguments, the table, phases that were done before, and the phases on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
VERSIONS = {"python": "3.11", "torch": "2.13", "gpu": "a GPU"}


def gpu_sh(*arguments: object) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, check=False)


def test_help_names_every_option() -> None:
    done = gpu_sh("--help")
    assert done.returncode == 0
    assert {"--wheels", "--peers", "--only", "--device"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "FOLDER"),
        (["x", "--only", "7"], "--only 7"),
        (["x", "--wheels", "/nowhere"], "/nowhere"),
        (["x", "--peers", "/nowhere"], "/nowhere"),
        (["x", "--only"], "--only"),
        (["x", "--device", "tpu"], "tpu"),
        (["x", "--fast"], "--fast"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: list[str], named: str) -> None:
    done = gpu_sh(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


def write_phase(path: Path, rows: list[tuple[str, float, str]]) -> None:
    path.write_text(json.dumps({"versions": VERSIONS, "date": "2026-11-24", "rows": rows}))


def test_the_table_shows_whole_and_partial_phases(tmp_path: Path) -> None:
    write_phase(tmp_path / "phase-0.json", [("copy bandwidth", 1234.0, "GB/s")])
    write_phase(tmp_path / "phase-3.partial.json", [("Qwen3-0.6B 1 streams", 56.7, "tok/s")])
    done = gpu_sh(tmp_path, "--only", "0")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "copy", "bandwidth", "1234", "GB/s"] in lines
    assert ["1", "not", "run"] in lines
    assert ["3", "incomplete"] in lines


def test_the_phases_run_on_the_cpu_once(tmp_path: Path) -> None:
    first = gpu_sh(tmp_path, "--device", "cpu")
    assert first.returncode == 0, first.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [f"phase-{n}.json" for n in (0, 1, 2, 3, 5, 6)]
    rows = json.loads((tmp_path / "phase-1.json").read_text())["rows"]
    assert [(value, unit) for _, value, unit in rows] == [(3, "ok")] * 9
    rows = json.loads((tmp_path / "phase-5.json").read_text())["rows"]
    figures = {name.removeprefix("tiny-llama 4 streams: "): value for name, value, _ in rows}
    assert figures["kernels and copies in a step"] == figures["calls that start them"] > 1
    assert 0 <= figures["the GPU idles"] < 100
    assert len(figures) == 13
    rows = json.loads((tmp_path / "phase-6.json").read_text())["rows"]
    assert [(value, unit) for _, value, unit in rows[:1]] == [(3, "ok")]
    assert [name.rpartition(": ")[2] for name, _, _ in rows[1:]] == ["1 ranks", "2 ranks"]
    assert gpu_sh(tmp_path, "--device", "cpu").stdout.count("done before") == 6


def test_a_phase_that_fails_names_its_cause_and_the_table_follows(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path, "--device", "cpu", "--only", "3")
    assert done.returncode == 1
    assert "run phase 0 first" in done.stderr
    assert "0 not run" in done.stdout
