"""Processes that decode images: equal arrays, and an end for each image, also if its process dies or hangs."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from octavo_engine.media.placeholders import make_image_tokens
from octavo_engine.media.processor import load_processor
from octavo_engine.media.worker import Image, MediaWorker, MediaWorkers, WorkerStart, encode
from octavo_engine.wire.errors import InvalidRequest, StartupError, Unavailable
from octavo_engine.wire.records import ImageInput
from octavo_testing.pictures import RED, empty_png, encoded, quarter
from octavo_testing.vision_checkpoints import VISION, model_files, write_vision_files

pytestmark = pytest.mark.slow

PNG = encoded(quarter(RED), "PNG")
SENT = encode(Image(PNG))
INPUT = ImageInput(start=0, length=1, digest=b"", data=PNG)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_files(tmp_path_factory.mktemp("vision"), VISION["smolvlm"])


@pytest.fixture
def worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MediaWorker]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    worker = MediaWorker(WorkerStart(str(folder), memory_bytes=512 * MIB))
    worker.start()
    yield worker
    worker.stop()


def pid_of(worker: MediaWorker) -> int:
    assert worker._child is not None
    return worker._child.pid


def test_arrays_equal_those_of_the_processor_in_this_process(worker: MediaWorker, folder: Path) -> None:
    processor = load_processor(model_files(folder))
    assert processor is not None
    expected = processor.process(PNG)
    found = worker.process(SENT)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


@pytest.mark.parametrize("family", ["internvl", "mistral3"])
def test_a_worker_calls_the_processor_as_the_model_does(family: str, tmp_path: Path) -> None:
    """The processors of these families call their image processors with settings that the model's config decides."""
    files = VISION[family]
    model = model_files(write_vision_files(tmp_path, files), files)
    data = encoded(quarter(RED, size=(100, 41)), "PNG")
    processor = load_processor(model)
    assert processor is not None
    expected = processor.process(data)["pixel_values"]
    (tmp_path / "config.json").write_text("{}")  # whose keys are overridden
    worker = MediaWorker(WorkerStart(str(tmp_path), model.config))
    try:
        worker.start()
        assert np.array_equal(worker.process(encode(Image(data)))["pixel_values"], expected)
    finally:
        worker.stop()
    rule = make_image_tokens(files.family, files.hf, files.image, "<image>")
    assert expected.size == 3 * math.prod(rule.scaled_size(100, 41)) + (3 * 28 * 28 if family == "internvl" else 0)


def test_a_worker_has_the_settings_of_the_start_and_of_an_image(folder: Path) -> None:
    smaller, whole = {"size": {"longest_edge": 64}}, json.dumps({"do_image_splitting": False})
    processor = load_processor(model_files(folder), smaller)
    assert processor is not None
    worker = MediaWorker(WorkerStart(str(folder), kwargs=smaller, max_pixels=48 * 32))
    try:
        worker.start()
        for kwargs, num_tiles in (("", 5), (whole, 1)):
            found = worker.process(encode(Image(PNG, kwargs)))["pixel_values"]
            assert np.array_equal(found, processor.process(PNG, kwargs=kwargs)["pixel_values"])
            assert found.shape[1] == num_tiles
        with pytest.raises(InvalidRequest, match=r"49 x 32 pixels; the limit is 1536 .*--max-image-pixels"):
            worker.process(encode(Image(encoded(quarter(RED, size=(49, 32)), "PNG"))))
    finally:
        worker.stop()


def test_a_worker_has_neither_torch_nor_secrets(worker: MediaWorker) -> None:
    process = psutil.Process(pid_of(worker))
    assert process.environ().keys() <= {
        *(
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "TRANSFORMERS_VERBOSITY",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "LC_CTYPE",
        )
    }
    assert process.num_threads() == 1
    loaded = {mapped.path for mapped in process.memory_maps()}
    assert any("/PIL/" in path for path in loaded)
    assert not any("torch" in path for path in loaded)


def test_a_bad_image_fails_and_the_worker_stays(worker: MediaWorker) -> None:
    pid = pid_of(worker)
    with pytest.raises(InvalidRequest, match=r"^it cannot be decoded"):
        worker.process(encode(Image(PNG[:60])))
    assert worker.process(SENT)
    assert pid_of(worker) == pid


def test_an_image_that_needs_more_memory_than_the_limit_is_refused(worker: MediaWorker) -> None:
    """It has 48 million pixels, of 4 bytes each, as allowed."""
    with pytest.raises(InvalidRequest, match="more than 512 MiB of memory"):
        worker.process(encode(Image(empty_png(8000, 6000))))
    assert worker.process(SENT)


def test_a_worker_that_hangs_is_killed_and_replaced(worker: MediaWorker) -> None:
    pid = pid_of(worker)
    os.kill(pid, signal.SIGSTOP)
    worker._timeout_s = 0.5
    with pytest.raises(InvalidRequest, match=r"took longer than 0\.5 s"):
        worker.process(SENT)
    assert not psutil.pid_exists(pid)
    worker._timeout_s = 300
    assert worker.process(SENT)
    assert pid_of(worker) != pid


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, Unavailable), (signal.SIGSEGV, InvalidRequest)])
def test_a_worker_that_dies_fails_its_image_and_is_replaced(
    worker: MediaWorker, number: signal.Signals, error: type[Exception]
) -> None:
    pid, connection = pid_of(worker), worker._connection
    assert connection is not None

    class DeadlyConnection:
        def send_bytes(self, data: bytes) -> None:
            connection.send_bytes(data)
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)

        def __getattr__(self, name: str) -> Any:
            return getattr(connection, name)

    os.kill(pid, signal.SIGSTOP)  # it reads the image when the signal has come
    os.kill(pid, signal.SIGSTOP)
    worker._connection = DeadlyConnection()  # type: ignore[assignment]
    with pytest.raises(error):
        worker.process(SENT)
    assert worker.process(SENT)
    assert pid_of(worker) != pid


def test_a_worker_that_died_idle_is_replaced_without_an_error(worker: MediaWorker) -> None:
    assert worker._child is not None
    worker._child.kill()
    worker._child.wait()
    assert worker.process(SENT)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_ends_with_its_parent(folder: Path, is_stopped: bool) -> None:
    """It ends also if it can't notice by itself, as one that is busy."""
    code = f"""
import os, signal
from octavo_engine.media.worker import MediaWorkers, WorkerStart
pid = MediaWorkers(WorkerStart({str(folder)!r}), 1)._workers[0]._child.pid
if {is_stopped}:
    os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        psutil.Process(int(done.stdout)).wait(60)
    except psutil.NoSuchProcess:
        return
    assert not psutil.pid_exists(int(done.stdout))


def test_workers_without_a_processor_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "UnknownProcessor"}')
    with pytest.raises(StartupError, match="cannot make its image processor"):
        MediaWorkers(WorkerStart(str(tmp_path)), 2)


def test_all_processes_end_with_the_workers(folder: Path) -> None:
    workers = MediaWorkers(WorkerStart(str(folder)), 2)
    assert all(workers.process(INPUT).result() for _ in range(4))
    pids = [pid_of(worker) for worker in workers._workers]
    workers.shutdown()
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(RuntimeError):
        workers.process(INPUT)
