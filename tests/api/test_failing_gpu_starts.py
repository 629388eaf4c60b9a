"""Starts on a GPU that fail in their first steps or before: one line with cause and remedy, by each way to start."""

import subprocess
import sys
from pathlib import Path

import pytest
from octavo_testing.failing_start import CAUSES, MODULE
from octavo_testing.serve_command import free_port
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "20", "--device", "cpu", "--num-threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    address = ("--host", "127.0.0.1", "--port", str(free_port()))
    command = [sys.executable, "-P", "-m", MODULE, name, *arguments, *FLAGS, *address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", CAUSES)
def test_serve_fails_with_one_line(name: str, folder: Path) -> None:
    done = run(name, "serve", str(folder))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "Remedy: --device cpu" in line)
    assert line.startswith("octavo: ")
    assert CAUSES[name] in line
    assert done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("name", CAUSES)
def test_up_shows_the_line_of_the_engine_and_ends(name: str, folder: Path) -> None:
    done = run(name, "up", str(folder))
    shown = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in shown
    _, _, report = shown.partition("replica-0 could not start: it ended with exit code 1")
    (line,) = (line for line in report.splitlines() if "Remedy: --device cpu" in line)
    assert CAUSES[name] in line


@pytest.mark.parametrize("name", CAUSES)
def test_a_script_ends_with_one_line(name: str, folder: Path) -> None:
    script = f"""
from octavo_engine import LLM
try:
    LLM({str(folder)!r}, loader="{MODULE}:{name}", dtype="float32", num_gpu_blocks_override=20, device="cpu")
except Exception as error:
    print(type(error).__name__, "|", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("StartupError | ")
    assert CAUSES[name] in line
    assert "Remedy: --device cpu" in line
