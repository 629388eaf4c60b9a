"""The file of `--trace`: a pipe is refused at once, as its reader could stop the engine."""

import os
from pathlib import Path

import pytest
from octavo_engine.loop.trace_file import TraceFile
from octavo_engine.wire.errors import StartupError


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_is_refused(tmp_path: Path, has_reader: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
    with pytest.raises(StartupError, match=f"--trace: cannot write {tmp_path}/pipe: .*: name a file"):
        TraceFile(tmp_path / "pipe")
    if has_reader:
        os.close(reader)


def test_an_earlier_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("of an earlier engine")
    trace = TraceFile(tmp_path / "trace")
    trace.write("line\n")
    trace.close()
    assert (tmp_path / "trace").read_text() == "line\n"
