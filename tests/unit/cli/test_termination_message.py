"""The termination message of a container: JSON with a code, within Kubernetes' limit."""

import json
from pathlib import Path

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.termination_message import MAX_BYTES, report_startup_error, termination_message


def test_a_start_error_is_printed_and_written_with_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    report_startup_error(StartupError("no room", code="OutOfMemory"), path)
    assert json.loads(path.read_text()) == {"code": "OutOfMemory", "message": "no room"}
    assert capsys.readouterr().err == "octavo: no room\n"


def test_no_file_is_created_outside_a_container(tmp_path: Path) -> None:
    report_startup_error(StartupError("x"), tmp_path / "termination-log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("character", ["x", "ü", "\n"], ids=["ASCII", "not ASCII", "escaped"])
def test_a_long_message_is_cut_to_the_limit_of_kubernetes(character: str) -> None:
    text = termination_message(StartupError(character * 10_000))
    assert len(text.encode()) <= MAX_BYTES
    assert json.loads(text)["message"].startswith(character * 100)
