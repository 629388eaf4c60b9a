"""`benchmarks/gpu` without a step that computes: arguments, cases that fail, the summary, and the folder of wheels."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAKE = """
import os, time
from gpu.step import parse_step, run_cases

def die(step): os._exit(7)
def hang(step): time.sleep(9999)
def fault(step): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def absent(step): import no_such_kernel
def pid(step): step.figure("pid", os.getpid())

cases = {"pid": pid, "die float32": die, "pid 2": pid, "fault 64x7": fault, "hang dim 80": hang, "absent": absent}
run_cases(parse_step("fake"), cases | {"pid 3": pid}, workers=1, case_s=3.0)
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run_gpu(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(BENCHMARKS / "gpu" / "run"), *map(str, arguments)]
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def run_fake(folder: Path, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the step above; return its lines."""
    steps = tmp_path / "source" / "gpu" / "steps"
    steps.mkdir(parents=True)
    folder.mkdir()
    (steps / "fake.py").write_text(FAKE)
    paths = f"{BENCHMARKS}:{tmp_path / 'source'}"
    env = os.environ | {"PYTHONPATH": paths, "OCTAVO_GPU_WORK": str(tmp_path)}
    command = [sys.executable, "-m", "gpu.steps.fake", str(folder), "--device", "cpu", *arguments]
    subprocess.run(command, capture_output=True, env=env, timeout=300, check=True)
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def test_each_case_has_a_process_and_one_that_fails_costs_its_line_only(tmp_path: Path) -> None:
    lines = run_fake(tmp_path / "out", tmp_path)
    fails = {line["name"]: line["note"] for line in lines if line["status"] == "FAIL"}
    assert list(fails) == ["die float32", "fault 64x7", "hang dim 80", "absent"]
    assert "ended with 7" in fails["die float32"]
    assert "illegal memory access" in fails["fault 64x7"]
    assert "no answer within 3 s" in fails["hang dim 80"]
    assert "no_such_kernel" in fails["absent"]
    assert len({line["value"] for line in lines if line["name"] == "pid"}) == 3


def test_cases_can_be_chosen(tmp_path: Path) -> None:
    assert len(run_fake(tmp_path / "out", tmp_path, "--match", "pid [23]")) == 2


def test_cases_without_time_are_one_line(tmp_path: Path) -> None:
    lines = run_fake(tmp_path / "out", tmp_path, "--ends", "0")
    assert [(line["name"], line["status"]) for line in lines] == [("7 cases", "skip")]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "folder"),
        (["x", "--only", "7"], "7: no such step"),
        (["x", "--wheels", "/nowhere"], "/nowhere"),
        (["x", "--peers", "/"], "vllm/bin/python"),
        (["x", "--device", "tpu"], "tpu"),
        (["x", "--budget", "soon"], "soon"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: list[str], named: str, tmp_path: Path) -> None:
    done = run_gpu(*(tmp_path / each if each == "x" else each for each in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


def test_a_step_without_time_is_not_run_and_the_lines_of_others_stay(tmp_path: Path) -> None:
    old = [{"step": step, "name": "old", "status": "ok"} for step in ("kernels", "tokens")]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    done = run_gpu(tmp_path, "--only", "kernels:x", "--budget", 5, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["status"]) for line in lines] == [
        ("tokens", "old", "ok"),
        ("kernels", "whole step", "skip"),
    ]
    assert "skip   kernels whole step: not run" in done.stdout


def test_a_summary_has_at_most_120_lines_and_failures_first(tmp_path: Path) -> None:
    from gpu import report

    for step in report.STEPS:
        for status, count in {"ok": 100, "figure": 5, "skip": 1, "FAIL": 100}.items():
            for i in range(count):
                report.append_line(tmp_path, report.Line(step, f"{status} {i}", status, 0.5, "s"))
    printed = report.write_summary(tmp_path)
    assert len(printed) <= report.MOST_PRINTED
    kinds = [line.split()[0] for line in printed]
    assert (kinds.count("FAIL"), kinds.count("skip"), kinds.count("figure")) == (50, 6, 30)
    assert kinds.index("FAIL") < kinds.index("skip") < kinds.index("figure") < kinds.index("ok")
    assert printed[kinds.index("ok")].startswith("ok     tokens ")
    assert printed[0] == "== machine: 100 FAIL, 1 skip, 5 figure, 100 ok"
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 1236


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    folder.mkdir(exist_ok=True)
    info, fields = f"{name}-{version}.dist-info", [f"Name: {name}", f"Version: {version}"]
    fields += [f"Requires-Dist: {text}" for text in requires]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *fields, ""]))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip see the wheels of this folder only; this project requires `one` and torch."""
    from gpu import wheel_folder

    (tmp_path / "constraints.txt").write_text("three<2\n")
    monkeypatch.setattr(wheel_folder, "ROOT", tmp_path)
    monkeypatch.setattr(wheel_folder, "own_requirements", lambda: ["one", "torch>=2"])
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "index"


def test_wheels_are_all_that_the_machine_lacks(index: Path, tmp_path: Path) -> None:
    from gpu.wheel_folder import collect

    write_wheel(index, "one", "2.0", "two_b>=2", "numpy", "old; python_version<'3'", "extra; extra=='x'")
    for name, requires in {"two_b": ["three"], "three": [], "numpy": []}.items():
        for version in ("1.0", "2.0"):
            write_wheel(index, name, version, *requires)
    wheels = collect(tmp_path / "wheels", {"torch", "numpy"})
    assert [wheel.name for wheel in wheels] == [
        f"{each}-py3-none-any.whl" for each in ("one-2.0", "three-1.0", "two_b-2.0")
    ]


def test_wheels_that_contradict_each_other_are_refused(index: Path, tmp_path: Path) -> None:
    from gpu.wheel_folder import collect

    write_wheel(index, "one", "2.0", "three>=2")
    write_wheel(index, "three", "2.0")
    with pytest.raises(subprocess.CalledProcessError):
        collect(tmp_path / "wheels", {"torch"})


def test_wheels_of_an_earlier_day_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    write_wheel(tmp_path, "one", "2.0")
    command = [sys.executable, str(BENCHMARKS / "gpu" / "wheel_folder.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "name a new folder" in done.stderr
