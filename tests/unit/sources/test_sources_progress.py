"""Progress of a download: measured by file sizes, shown as log lines or as a bar on a terminal."""

import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest
from octavo_engine.sources.adapter import read_adapter
from octavo_engine.sources.download_dir import lock_folder
from octavo_engine.sources.json_file import read_json_object
from octavo_engine.sources.progress import LoadEnded, folder_bytes, show_progress, size_text
from octavo_engine.sources.retries import Interrupted, with_retries
from octavo_engine.weights.safetensors_file import READ_BYTES, iter_safetensors
from octavo_engine.wire.errors import StartupError
from octavo_testing.adapter_files import llama_pairs, write_adapter

LIMIT_S = 30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (5 * 2**30, "5.00 GiB"), (2**41, "2048.00 GiB")],
)
def test_sizes_have_readable_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_all_files_below_a_folder_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"123")
    (tmp_path / "g").write_bytes(b"45")
    assert folder_bytes(tmp_path) == 5
    assert folder_bytes(tmp_path / "absent") == 0


def until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_log_gets_a_line_per_period(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files that existed before are not counted."""
    (tmp_path / "before").write_bytes(bytes(1000))
    with caplog.at_level(logging.INFO), show_progress("m", tmp_path, 4096, period_s=0.01, has_bar=False):
        (tmp_path / "part").write_bytes(bytes(1024))
        until(lambda: "1.00 KiB of 4.00 KiB (25 %)" in caplog.text)
        (tmp_path / "part").write_bytes(bytes(4096))
        until(lambda: "4.00 KiB of 4.00 KiB (100 %)" in caplog.text)
    assert re.search(r"m: 1\.00 KiB of 4\.00 KiB \(25 %\), [\d.]+ KiB/s, \d+ s left", caplog.text)


def test_a_terminal_gets_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("hf://org/m", tmp_path, 2048, has_bar=True):
        (tmp_path / "part").write_bytes(bytes(2048))
    assert "hf://org/m: 100%" in capsys.readouterr().err


def test_a_failure_ends_the_progress(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), show_progress("m", tmp_path, 1, period_s=0.01):
        raise ValueError("broken")


class Count:
    """An `Advance` that counts, and raises LoadEnded once it has `most` bytes."""

    def __init__(self, most: float = float("inf")) -> None:
        self.most, self.steps = most, []

    def __call__(self, num_bytes: int) -> None:
        if self.total >= self.most:
            raise LoadEnded
        self.steps.append(num_bytes)

    @property
    def total(self) -> int:
        return sum(self.steps)


def test_a_download_is_counted_while_it_runs_and_ends_at_its_next_byte(tmp_path: Path) -> None:
    count = Count(most=4096)
    with show_progress("m", tmp_path, 8192, period_s=0.01, has_bar=False, advance=count):
        for size in (1024, 4096, 8192):
            (tmp_path / "part").write_bytes(bytes(size))
            until(lambda size=size: count.total >= min(size, 4096))


def test_a_slow_file_is_counted_byte_by_byte(tmp_path: Path) -> None:
    """A FIFO gives what its writer has written, as a slow volume does."""
    os.mkfifo(tmp_path / "slow.json")
    count, read = Count(), []
    thread = threading.Thread(target=lambda: read.append(read_json_object(tmp_path / "slow.json", advance=count)))
    thread.start()
    with (tmp_path / "slow.json").open("wb", buffering=0) as file:
        for written, byte in enumerate(b'{"a":1}', 1):
            file.write(bytes([byte]))
            until(lambda written=written: count.total == written)
    thread.join()
    assert read == [{"a": 1}]


def test_an_endless_file_is_refused_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("/dev/zero")
    with pytest.raises(StartupError, match="more than 4096 bytes, the limit"):
        read_json_object(tmp_path / "a.json", max_bytes=4096)


def test_all_bytes_of_an_adapter_are_counted_in_small_parts(tmp_path: Path) -> None:
    def read(count: Count) -> None:
        dict(iter_safetensors(read_adapter(folder, count).tensors_file, advance=count))

    folder, count = write_adapter(tmp_path / "a", llama_pairs()), Count()
    read(count)
    assert count.total == folder_bytes(folder)
    assert max(count.steps) <= READ_BYTES
    for most in range(0, count.total // 2, 1000):
        with pytest.raises(LoadEnded):
            read(Count(most))


def test_no_attempt_follows_the_end_of_a_load() -> None:
    attempts = []

    def act() -> None:
        attempts.append(1)
        count(1)
        raise Interrupted("the connection was lost")

    count = Count(most=1)
    with pytest.raises(LoadEnded):
        with_retries(act, "m", pause=lambda _: None, advance=count)
    assert len(attempts) == 1


def test_a_load_that_waits_for_the_download_of_another_sees_its_progress_and_can_end(tmp_path: Path) -> None:
    count, ended = Count(most=300), []

    def wait() -> None:
        try:
            with lock_folder(tmp_path, count):
                raise AssertionError("the folder is locked")
        except LoadEnded:
            ended.append(True)

    with lock_folder(tmp_path):
        thread = threading.Thread(target=wait)
        thread.start()
        (tmp_path / "part").write_bytes(bytes(100))
        until(lambda: count.total == 100)
        (tmp_path / "part").write_bytes(bytes(300))
        until(lambda: ended)
        thread.join()
    with lock_folder(tmp_path, Count()):
        pass
