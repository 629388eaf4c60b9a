"""Progress of a download: measured by file sizes, shown as log lines or as a bar on a terminal."""

import logging
import re
import time
from pathlib import Path

import pytest
from octavo_engine.sources.progress import folder_bytes, show_progress, size_text

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
